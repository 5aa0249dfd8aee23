import pytest

from sd_quant.engines.pool import Pool, Variant

pytestmark = pytest.mark.commit


class Opened:
    def __init__(self, key, log):
        self.key, self.log = key, log
        log.append(f"open {key}")

    def close(self):
        self.log.append(f"close {self.key}")


@pytest.fixture
def log() -> list[str]:
    return []


def sides(pool: Pool) -> tuple[Variant, Variant]:
    return Variant(pool, {"unet_xl": "a", "vae": "v"}), Variant(pool, {"unet_xl": "b", "vae": "v"})


def test_an_engine_is_opened_when_it_is_asked_for_and_shared_by_its_key(log):
    pool = Pool(lambda key: Opened(key, log))
    one, other = sides(pool)
    assert (list(one), len(other), log) == (["unet_xl", "vae"], 2, [])
    assert one["vae"] is other["vae"] and one["unet_xl"] is not other["unet_xl"]
    assert log == ["open v", "open a", "open b"]
    pool.close()
    assert sorted(log[3:]) == ["close a", "close b", "close v"]


def test_where_memory_is_short_one_is_closed_before_the_next_is_opened(log):
    one, other = sides(Pool(lambda key: Opened(key, log), most=1))
    for engine in (one["vae"], other["vae"], one["unet_xl"], one["unet_xl"], other["unet_xl"]):
        assert engine.key
    assert log == ["open v", "close v", "open a", "close a", "open b"]
