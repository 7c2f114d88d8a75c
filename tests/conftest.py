"""Options of the whole suite; pytest wants them where every run starts."""


def pytest_addoption(parser):
    parser.addoption("--verification-report", metavar="FILE", help="write a Markdown summary of tests/gpu to FILE")
