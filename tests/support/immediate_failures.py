"""A failure is printed when it happens: in a long run nobody waits for the end to read it."""

import pytest


class ImmediateFailures:
    """Prints each failure as soon as this process hears of it, from its own tests or from a process of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the traceback below the dots; the end of the run shows it once more."""
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")  # those who test for another have none
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_sep("_", f"failed: {report.nodeid} ({report.when})", red=True)
            terminal.write_line(report.longreprtext)
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ImmediateFailures(config))
