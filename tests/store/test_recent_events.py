"""The windows of live runs: what they hold, and how they stay within their bound."""

from bough_server.store.window import PAGE_BYTES, RecentEventsOfRuns
from tests.store.logs import Made, as_stored, completed, delta


def test_a_window_gives_what_is_after_a_sequence() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    made = run.next(delta("a"), delta("b"), delta("c"))
    windows.add(run.run_id, made[:2])
    windows.add(run.run_id, made[2:])
    window = windows.get_window(run.run_id)
    whole = as_stored(made)
    assert [list(window.page(after)) for after in range(5)] == [[], whole, whole[1:], whole[2:], []]


def test_readers_at_one_place_get_one_page_and_those_that_come_later_all_that_there_is() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    first, more = run.next(delta("a"), delta("b")), run.next(delta("c"))
    windows.add(run.run_id, first)
    window = windows.get_window(run.run_id)
    page = window.page(1)
    assert window.page(1) is page
    assert list(window.page(2)) == as_stored(first[1:])
    windows.add(run.run_id, more)
    assert list(page) == as_stored(first)
    assert list(window.page(1)) == as_stored([*first, *more])


def test_a_page_ends_at_a_mebibyte() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 30)
    made = run.next(*(delta("x" * (PAGE_BYTES // 3)) for _ in range(4)))
    windows.add(run.run_id, made)
    assert list(windows.get_window(run.run_id).page(1)) == as_stored(made[:2])


def test_the_largest_run_gives_up_its_oldest_events_first() -> None:
    small, large, windows = Made(number=1), Made(number=2), RecentEventsOfRuns(200_000)
    windows.add(small.run_id, small.next(delta("s" * 1_000)))
    made = [large.next(delta("l" * 70_000)) for _ in range(5)]
    for one in made:
        windows.add(large.run_id, one)
    assert windows.size <= 200_000
    assert len(windows.get_window(small.run_id).page(1)) == 1
    window = windows.get_window(large.run_id)
    assert [len(window.page(after)) for after in range(1, 6)] == [0, 0, 0, 2, 1]


def test_the_bound_counts_every_run() -> None:
    windows = RecentEventsOfRuns(50_000)
    for number in range(40):
        run = Made(number=number)
        windows.add(run.run_id, run.next(delta("x" * 3_000)))
        assert windows.size <= 50_000


def test_an_ended_run_gives_its_memory_back() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    reader = windows.get_window(run.run_id)
    windows.add(run.run_id, run.next(*(delta("x" * 1_000) for _ in range(100))))
    windows.add(run.run_id, run.next(completed()))
    assert windows.size == 0
    assert reader.is_ended
    assert len(reader.page(101)) == 1, "who follows closely needs no disk for the end"
    del reader
    assert windows.get_window(run.run_id).head == 0


def test_a_run_that_goes_on_after_a_failure_begins_a_new_window() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    reader = windows.get_window(run.run_id)
    windows.add(run.run_id, run.next(delta("a")))
    windows.fail(run.run_id, OSError("disk"))
    assert isinstance(reader.failure, OSError)
    made = run.next(delta("b"))
    windows.add(run.run_id, made)
    assert reader.failure is None
    assert list(reader.page(2)) == as_stored(made)
    windows.add(run.run_id, run.next(completed()))
    assert windows.size == 0


def test_who_comes_after_a_failure_is_told_as_well() -> None:
    windows = RecentEventsOfRuns(1 << 20)
    windows.fail("run", OSError("disk"))
    assert isinstance(windows.get_window("run").failure, OSError)


def test_a_followed_log_of_another_server_is_fed_and_counts_as_long_as_it_is_followed() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    window = windows.get_window(run.run_id)
    window.update_head(1, is_ended=False, surprises=0)
    windows.join(run.run_id, window)
    assert (windows.list_logs_to_poll(), windows.ends_of([run.run_id])) == ([run.run_id], {run.run_id: 1})
    fed = as_stored(run.next(delta("x" * 1_000), delta("b")))
    windows.feed(run.run_id, fed, epoch=1)
    windows.feed(run.run_id, fed[1:], epoch=1)
    assert list(window.page(1)) == fed
    assert (window.head, windows.size > 1_000) == (3, True)
    windows.leave(run.run_id, window)
    assert (windows.size, windows.list_logs_to_poll()) == (0, [])


def test_followed_logs_of_other_servers_stay_within_the_bound() -> None:
    windows = RecentEventsOfRuns(50_000)
    kept = []
    for number in range(40):
        run = Made(number=number)
        window = windows.get_window(run.run_id)
        window.update_head(1, is_ended=False, surprises=0)
        windows.join(run.run_id, window)
        kept.append(window)
        windows.feed(run.run_id, as_stored(run.next(delta("x" * 3_000))), epoch=1)
        assert windows.size <= 50_000


def test_a_log_changes_hands_and_its_size_is_counted_once() -> None:
    run, windows = Made(), RecentEventsOfRuns(1 << 20)
    window = windows.get_window(run.run_id)
    window.update_head(1, is_ended=False, surprises=0)
    windows.join(run.run_id, window)
    windows.feed(run.run_id, as_stored(run.next(delta("a"))), epoch=1)
    windows.add(run.run_id, run.next(delta("b")))
    assert (windows.list_logs_to_poll(), windows.size) == ([], window.size)
    windows.release(run.run_id)
    windows.feed(run.run_id, as_stored(run.next(delta("c"))), epoch=3)
    assert (windows.list_logs_to_poll(), windows.size) == ([run.run_id], window.size)
    assert [event.sequence for event in window.page(1)] == [2, 3, 4]
    windows.leave(run.run_id, window)
    assert windows.size == 0


def test_a_failure_holds_until_the_log_has_another_epoch() -> None:
    windows = RecentEventsOfRuns(1 << 20)
    windows.fail("run", OSError("disk"), epoch=2)
    window = windows.get_window("run")
    for epoch, is_failed in ((2, True), (3, False)):
        windows.clear_stale_failure("run", epoch=epoch)
        assert (window.failure is not None) is is_failed
        assert windows.note_growth("run") is is_failed


def test_a_read_that_began_before_a_notification_does_not_say_where_a_log_ends() -> None:
    windows = RecentEventsOfRuns(1 << 20)
    window = windows.get_window("run")
    before = window.surprises
    assert not windows.note_growth("run")
    window.update_head(5, is_ended=False, surprises=before)
    assert not window.is_known_through(5)
    window.update_head(6, is_ended=False, surprises=window.surprises)
    assert window.is_known_through(6)
