"""What several servers show, read as that of one."""

from __future__ import annotations

from typing import Any

from bigmodel.server.merged_view import merge_views


def device(name: str, weights: int, budget: int | None = 100, planned: dict[str, int] | None = None) -> dict[str, Any]:
    return {"device": name, "weights": weights, "budget": budget, "planned": planned}


def engine(running: int, max_length: int = 64, **changes: Any) -> dict[str, Any]:
    kv = {"used": running, "capacity": 10}
    return {"state": "running", "running": running, "max_length": max_length, "kv_tokens": kv, **changes}


def shown(engine: Any, devices: list[dict[str, Any]], streamed: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"plan": None, "devices": devices, "streamed": streamed or [], "engine": engine}


def test_bytes_add_up_by_device() -> None:
    merged = merge_views(
        [
            shown(None, [device("cuda:0", 3, planned={"kv": 1}), device("cpu", 5)]),
            shown(None, [device("cuda:0", 4, planned={"kv": 2})]),
        ]
    )
    assert merged["devices"] == [device("cuda:0", 7, 200, {"kv": 3}), device("cpu", 5)]


def test_a_sum_of_which_a_part_is_unknown_is_unknown() -> None:
    (merged,) = merge_views([shown(None, [device("cpu", 1, 9)]), shown(None, [device("cpu", 2, None)])])["devices"]
    assert (merged["weights"], merged["budget"]) == (3, None)


def test_streamed_bytes_add_up_by_device() -> None:
    entries = [[{"device": "cuda:0", "bytes_from_ram": n, "seconds_waited": n / 2}] for n in (1, 2)]
    merged = merge_views([shown(None, [], streamed) for streamed in entries])
    assert merged["streamed"] == [{"device": "cuda:0", "bytes_from_ram": 3, "seconds_waited": 1.5}]


def test_engines_count_together_and_share_what_they_have_in_common() -> None:
    merged = merge_views([shown(engine(1, 64), []), shown(engine(2, 32, state="draining"), []), shown(None, [])])
    assert merged["engine"] == {
        "state": None,
        "running": 3,
        "max_length": 32,
        "kv_tokens": {"used": 3, "capacity": 20},
    }


def test_while_all_still_load_there_is_no_engine() -> None:
    assert merge_views([shown(None, []), shown(None, [])]) == {"devices": [], "streamed": [], "engine": None}


def test_one_server_reads_as_itself() -> None:
    alone = shown(engine(1), [device("cpu", 5)])
    assert merge_views([alone]) == {key: alone[key] for key in ("devices", "streamed", "engine")}
