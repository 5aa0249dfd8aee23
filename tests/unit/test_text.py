import pytest

from sd_quant.text import escaped, one_line, printable

pytestmark = pytest.mark.commit

HOSTILE = "\x1b[31mred\n\u202edesrever\ud800"


def test_nothing_of_a_stranger_reaches_a_terminal_as_a_control_sequence():
    assert printable(HOSTILE) == " [31mred  desrever "
    assert escaped(HOSTILE) == r"\x1b[31mred\n\u202edesrever\ud800"
    assert one_line(HOSTILE) == "[31mred desrever"


def test_what_is_cut_ends_in_dots():
    assert one_line("a page\n\n  of a library's words", 9) == "a page..."
    assert one_line("  nine\nletters ", 12) == "nine letters"
    assert one_line(ValueError()) == ""
