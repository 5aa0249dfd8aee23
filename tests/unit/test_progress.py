import io
import logging
import re
import sys
import time

import pytest

from sd_quant import progress as module
from sd_quant.progress import ConsoleFormatter, progress

pytestmark = pytest.mark.commit


def test_a_line_says_how_far_work_is_and_how_much_is_left_by_what_it_took_so_far(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    work = module.Work("calibrate", 10)
    now[0] += 36
    assert work.line() == "calibrate: 0 of 10, 36 s so far"
    work.done = 3
    assert work.line() == "calibrate: 3 of 10, about 84 s to go"
    now[0] += 200
    assert work.line() == "calibrate: 3 of 10, about 9 min to go"
    assert module.Work("export", started=now[0] - 40).line() == "export: 40 s so far"


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.02)
    monkeypatch.setattr(module, "POLLED_EVERY", 0.005)


def heard(caplog, line: str) -> bool:
    """Whether a line is printed within half a minute."""
    for _ in range(3000):
        if line in caplog.text:
            return True
        time.sleep(0.01)
    return False


def test_nothing_is_silent_for_long(monkeypatch, caplog, hasty):
    """Neither one unit of work that takes long, nor what has no units; the innermost is named, in whatever thread."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        assert heard(caplog, "latency: ")
        with progress(5, "rounds") as advance:
            advance()
            assert heard(caplog, "rounds: 1 of 5, about ")
    assert sys.stderr.getvalue() == "" and module.GOING_ON == []


def test_who_prints_lines_is_not_interrupted(monkeypatch, caplog, hasty):
    monkeypatch.setattr(ConsoleFormatter, "last_line", time.monotonic() + 60)
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        time.sleep(0.1)
    assert caplog.messages == []


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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(ConsoleFormatter())
        handler.handle(logging.makeLogRecord({"msg": "export", "levelno": logging.INFO}))
    assert "calibrate: 100%" in sys.stderr.getvalue() and "2/2" in sys.stderr.getvalue()
    assert re.search(r"\r +\r\d\d:\d\d:\d\d export\n", sys.stderr.getvalue())  # in the bar's place, not behind it
    assert caplog.messages == []


def test_what_a_command_ends_with_and_what_libraries_tell_is_kept_from_the_console():
    said = logging.makeLogRecord({"name": "sd_quant.cli", "levelno": logging.ERROR, "said_at_the_end": True})
    ours, library, warning = (
        logging.makeLogRecord({"name": name, "levelno": level})
        for name, level in (("sd_quant.x", logging.INFO), ("onnx_ir", logging.INFO), ("onnx_ir", logging.WARNING))
    )
    shown = [module.ConsoleFilter().filter(record) for record in (said, ours, library, warning)]
    assert shown == [False, True, False, True]


def test_a_console_line_has_no_logger_and_a_warnings_level():
    texts = [
        ConsoleFormatter().format(logging.LogRecord("sd_quant.x", level, "x.py", 1, "export: %s s", (3,), None))
        for level in (logging.INFO, logging.WARNING)
    ]
    assert [text[8:] for text in texts] == [" export: 3 s", " WARNING: export: 3 s"]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d .*", text) for text in texts)
