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


def test_nothing_is_silent_for_long_and_who_prints_lines_is_not_interrupted(monkeypatch, caplog):
    """Neither one unit of work that takes long, nor what has no units; the innermost is named, in whatever thread."""

    def heard(line: str) -> bool:
        """Within half a minute."""
        return any(line in caplog.text or time.sleep(0.01) for _ in range(3000))

    monkeypatch.setattr(module, "QUIET", 0.02)
    monkeypatch.setattr(module, "POLLED_EVERY", 0.005)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        assert heard("latency: ")
        with progress(5, "rounds") as advance:
            advance()
            assert heard("rounds: 1 of 5, about ")
    assert sys.stderr.getvalue() == "" and module.GOING_ON == []
    caplog.clear()
    monkeypatch.setattr(ConsoleFormatter, "last_line", time.monotonic() + 60)
    with caplog.at_level(logging.INFO, "sd_quant.progress"), module.working("latency"):
        time.sleep(0.1)
    assert caplog.messages == []


def test_a_terminal_gets_a_bar(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.isatty = lambda: True
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
    for level, said in ((logging.INFO, " export: 3 s"), (logging.WARNING, " WARNING: export: 3 s")):
        record = logging.LogRecord("sd_quant.x", level, "x.py", 1, "export: %s s", (3,), None)
        assert re.fullmatch(rf"\d\d:\d\d:\d\d{said}", ConsoleFormatter().format(record))
