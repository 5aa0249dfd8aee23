import io
import logging
import re
import sys
import time

import pytest

from sd_quant import progress as module
from sd_quant.progress import ConsoleFormatter, progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when the test says so."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_log_hears_every_half_minute_how_long_it_takes(monkeypatch, caplog, clock):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "sd_quant.progress"), progress(10, "calibrate") as advance:
        for _ in range(10):
            clock[0] += 12
            advance()
    assert caplog.messages == [
        "calibrate: 3 of 10, about 84 s to go",
        "calibrate: 6 of 10, about 48 s to go",
        "calibrate: 9 of 10, about 12 s to go",
    ]
    with caplog.at_level(logging.INFO, "sd_quant.progress"), progress(2, "export") as advance:
        advance()
        clock[0] += 100
        advance()
    assert len(caplog.messages) == 3  # nothing of short work, and of the last unit
    assert sys.stderr.getvalue() == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with caplog.at_level(logging.INFO), progress(2, "calibrate") as advance:
        assert "calibrate:   0%" in sys.stderr.getvalue()
        advance()
        time.sleep(0.15)  # the bar redraws ten times a second
        advance()
    assert "calibrate: 100%" in sys.stderr.getvalue() and "2/2" in sys.stderr.getvalue()
    assert caplog.messages == []


def test_a_console_line_has_no_logger_and_a_warnings_level():
    texts = [
        ConsoleFormatter().format(logging.LogRecord("sd_quant.x", level, "x.py", 1, "export: %s s", (3,), None))
        for level in (logging.INFO, logging.WARNING)
    ]
    assert [text[8:] for text in texts] == [" export: 3 s", " WARNING: export: 3 s"]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d .*", text) for text in texts)
