"""Timelines in the Chrome trace event format, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran on a `track` from `start_s` for `seconds`."""

    track: str
    name: str
    start_s: float
    seconds: float
    group: str = ""


def to_chrome_trace(spans: Iterable[Span], title: str) -> str:
    """JSON of complete events ("X"), one thread per track, times in microseconds."""
    spans = list(spans)
    tracks = {track: number for number, track in enumerate(dict.fromkeys(s.track for s in spans), start=1)}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": title}},
        *(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for track, tid in tracks.items()
        ),
        *(
            {
                "ph": "X",
                "pid": 1,
                "tid": tracks[s.track],
                "name": s.name,
                "cat": s.group or "operator",
                "ts": round(s.start_s * 1e6, 4),
                "dur": round(s.seconds * 1e6, 4),
            }
            for s in spans
        ),
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"
