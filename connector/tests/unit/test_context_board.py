from __future__ import annotations

from disagg_connector.context import BOARD_SIZE, Board


def test_a_load_that_is_known_counts_before_its_request() -> None:
    board = Board(lambda: 5.0)
    assert board.ask("key", "") == "unknown"
    board.set("key", "computing")
    assert board.ask("key", "xid") == "computing"
    board.set("xid", "writing")
    board.set("key", "gone")
    assert board.ask("key", "xid") == "writing"


def test_asking_renews_the_lease() -> None:
    now = [5.0]
    board = Board(lambda: now[0])
    assert board.renewed("key") == float("-inf")
    board.ask("key", "")
    assert board.renewed("key") == 5.0
    board.forget_renewal("key")
    assert board.renewed("key") == float("-inf")


def test_what_others_ask_for_does_not_pile_up() -> None:
    board = Board(lambda: 0.0)
    for number in range(BOARD_SIZE + 10):
        board.ask(f"made-up-{number}", "")
        board.set(f"turn-{number}", "gone")
    assert board.renewed("made-up-0") == float("-inf")
    assert board.renewed(f"made-up-{BOARD_SIZE}") == 0.0
    assert board.get("turn-0") == "unknown"
