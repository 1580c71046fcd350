"""Who is in a closed loop that has run for long, and how far each request is: where a simulation may begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.spec import SteadyStart

_GOLDEN_RATIO = (5**0.5 - 1) / 2


class Life(NamedTuple):
    """A request with `generated` output tokens, which arrived `age_s` ago.

    While its prompt is not computed it joins later: in `joins_s`, with its first token and at that age.
    """

    spec: RequestSpec
    age_s: float
    joins_s: float
    generated: int


def lives_amid(requests: Sequence[RequestSpec], steady: SteadyStart) -> list[Life]:
    """As many requests as are given, amid their lives, the oldest first and with ids from 0.

    What a user is found with is one of the given requests with a chance in proportion to how long it lives, at an age
    anywhere in that life. Lives last for `steady.ttft_s` and a time in proportion to their output. Chances are spread
    evenly, not drawn: lives of all requests are laid end to end by length and cut at even places, and ages within them
    follow multiples of the golden ratio, of which any run is even. So any stretch of time sees its share of ends.
    """
    count = len(requests)
    outputs = np.asarray([spec.output_tokens for spec in requests], dtype=np.float64)
    decode_s = (steady.lifetime_s - steady.ttft_s) * outputs / outputs.mean()
    by_length = np.argsort(decode_s, kind="stable")
    ends_s = (steady.ttft_s + decode_s[by_length]).cumsum()
    cuts_s = (np.arange(count) + 0.5) * (ends_s[-1] / count)
    chosen = by_length[np.minimum(ends_s.searchsorted(cuts_s), count - 1)]
    ages_s = (np.arange(1, count + 1) * _GOLDEN_RATIO % 1.0) * (steady.ttft_s + decode_s[chosen])
    lives: list[Life] = []
    for place in np.argsort(-ages_s, kind="stable").tolist():
        spec, age_s = requests[int(chosen[place])], float(ages_s[place])
        joins_s = max(steady.ttft_s - age_s, 0.0)
        decoded = max(age_s - steady.ttft_s, 0.0) / float(decode_s[chosen[place]])
        generated = 1 + min(int(decoded * (spec.output_tokens - 1)), max(spec.output_tokens - 2, 0))
        lives.append(Life(replace(spec, id=len(lives)), age_s + joins_s, joins_s, generated))
    return lives
