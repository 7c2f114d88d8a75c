"""Compile-time configuration: architecture limits, tile shapes, shared-memory layout, warp roles."""
