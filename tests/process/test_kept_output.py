"""What ranks print under an agent that keeps it: of each life, warm or cold, and on the way."""

from __future__ import annotations

from resilient.elastic.worker_logs import LogReader, find_sources

PRINTS_AND_DIES = """
life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("rank", rank, "of life", life, flush=True)
if life == "0" and rank == "0":
    sys.stderr.write("last words")
    sys.stderr.flush()
    os._exit(9)
"""


def test_each_life_s_output_is_kept_by_rank(train, tmp_path):
    agent = train(PRINTS_AND_DIES, "--log-dir", str(tmp_path / "logs"))
    assert agent.end() == 0, agent.err
    found = [
        (one.source.life, one.line.stream, one.line.text)
        for one in LogReader().read(find_sources(tmp_path))
    ]
    assert [text.partition(" on ")[0] for _, stream, text in found if stream == "run"] == [
        "starts (start)", "starts (failure)"
    ]  # fmt: skip
    for line in (
        (1, "out", "rank 0 of life 0"),
        (1, "err", "last words"),
        (2, "out", "rank 0 of life 1"),
    ):
        assert line in found
