import gc

from hypothesis import settings

from tests.helpers.shared_data import whats_missing

settings.register_profile("nightly", deadline=None, max_examples=200)
settings.register_profile("usual", deadline=None, max_examples=30)
settings.load_profile("usual")
gc.disable()  # until all tests are imported


def pytest_configure(config):
    """The process that hands out the tests to others needs no fixtures, and no torch."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.helpers.fixtures")


def pytest_collection_modifyitems(items):
    """The longest tests begin first, so that no worker waits for one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """From here on the garbage collector skips what was imported: millions of objects."""
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter):
    """Says once what data was missing, and where to get it."""
    for line in whats_missing():
        terminalreporter.write_line(line)
