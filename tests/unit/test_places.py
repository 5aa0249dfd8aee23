from pathlib import Path

import pytest

from sd_quant import places
from sd_quant.errors import ConfigError, ResourceError
from sd_quant.places import HOME, check_shipped, existing, folder_name, input_path, lasting, output_path, shown

pytestmark = pytest.mark.commit


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_the_user_names_is_looked_for_here_first_then_among_what_ships(here):
    assert input_path("conf/quantize.yaml") == HOME / "conf/quantize.yaml"
    mine = here / "conf/quantize.yaml"
    mine.parent.mkdir()
    mine.touch()
    assert input_path("conf/quantize.yaml") == mine
    assert input_path(mine) == mine


def test_what_is_nowhere_is_expected_here_and_results_go_here(here):
    assert input_path("no/such") == output_path("no/such") == here / "no/such"
    assert output_path("conf/quantize.yaml") == here / "conf/quantize.yaml"


def test_a_refusal_says_where_was_looked(here):
    with pytest.raises(ConfigError) as refused:
        existing("model.path", "no/such", "another")
    expected = f"model.path names no/such, which does not exist (looked in {here} and {HOME}); give another"
    assert str(refused.value) == expected
    with pytest.raises(ConfigError, match="^model.path names /no/such, which does not exist; give another$"):
        existing("model.path", "/no/such", "another")
    assert existing("model.path", "conf", "another") == HOME / "conf"


def test_a_record_keeps_paths_that_lead_to_the_same_file_from_elsewhere(here):
    (here / "mine.txt").touch()
    assert lasting("mine.txt") == str(here / "mine.txt")
    assert lasting("conf/quantize.yaml") == "conf/quantize.yaml"
    assert lasting("/no/such") == "/no/such"


def test_a_path_is_shown_as_it_is_seen_from_here(here):
    assert (shown(here / "outputs/one"), shown(Path("/no/such"))) == ("outputs/one", "/no/such")


def test_an_installation_without_its_configuration_is_refused(here, monkeypatch):
    check_shipped()
    monkeypatch.setattr(places, "CONF", here / "conf")
    with pytest.raises(ResourceError, match="was installed without its configuration; install it again"):
        check_shipped()


def test_a_name_of_a_folder_leads_nowhere_else_and_is_no_files():
    named = {
        "a.gguf": "a.gguf", "quant_level=2.5,alpha=auto": "quant_level=2.5,alpha=auto", "a b;c": "a-b-c",
        "..": "unnamed", ".": "unnamed", "": "unnamed", "../../etc": "-..-etc", ".lock": "lock", ".hydra": "hydra",
        "report.html": "report-html", "sweep.JSON": "sweep-JSON", "a.csv": "a-csv", "layers.png": "layers-png",
    }  # fmt: skip
    assert {text: folder_name(text) for text in named} == named
    long, other = folder_name("a" * 300), folder_name("a" * 301)
    assert len(long) < 140 and long != other
