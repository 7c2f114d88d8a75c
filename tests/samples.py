"""Arguments that make a sample quick; what is not here is quick as it stands."""

TOY: dict[str, tuple[str, ...]] = {
    "01_graph_api.py": ("--seqlen", "128", "--heads", "2"),
    "02_wrapper.py": ("--seqlen", "64"),
    "04_masks_and_sinks.py": ("--seqlen", "96"),
}
