import json
from pathlib import Path

from kvsim_traces.bench import bench_trace


def test_figures_are_there_and_nothing_is_left(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = bench_trace(
        tmp_path, shape=(20, 2, 2, 64), repeats=2, progress=lambda done, total: seen.append((done, total))
    )
    assert json.loads(json.dumps(found)) == found
    rates = {name for name in found if name.endswith(("_mb_s", "_gb_s"))}
    assert rates == {
        "append_mb_s",
        "append_float32_mb_s",
        "read_checked_gb_s",
        "read_unchecked_gb_s",
        "rows_gb_s",
        "write_fsync_mb_s",
        "memory_read_gb_s",
        "memcpy_gb_s",
    }
    assert all(found[name] >= 0 for name in rates)
    assert all(len(runs) == 2 for runs in found["runs"].values())
    assert found["bytes"] == 20 * 2 * 2 * 64 * 2
    assert seen == [(1, 2), (2, 2)]
    assert not list(tmp_path.iterdir())
