import threading

import pytest

from sd_quant.background import NoLongerWanted, beside, done

pytestmark = pytest.mark.commit


def test_work_goes_on_while_the_block_runs_and_its_result_comes_when_it_is_asked_for():
    met = threading.Barrier(2, timeout=30)  # which neither passes alone
    with beside(lambda check: met.wait() and 0 or "done") as future:
        met.wait()
        assert future.result() == "done"
    assert done("before").result() == "before" and done("before").done()


def test_what_the_work_raises_is_raised_where_its_result_is_asked_for():
    def fail(check):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"), beside(fail) as future:
        future.result()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_block_that_fails_stops_the_work_and_waits_for_its_end(error):
    ended = []

    def work(check):
        try:
            while True:
                check()
        except NoLongerWanted:
            ended.append("stopped")
            raise

    with pytest.raises(error), beside(work):
        raise error
    assert ended == ["stopped"]
