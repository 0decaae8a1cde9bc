"""Choosing the next token from one row of logits.

The steps, in this order: repeat penalty, top-k, top-p, min-p, temperature, draw. Every filter sees the candidates that the one before
left, renormalised. Tokens are ranked by logit, and equal logits by the lower id, so that a result never depends on how a sort happens
to break ties. A `Sampler` owns its random generator: the same seed and the same logits give the same tokens.
The logits must be finite; whoever computed them answers for that.
"""

import math
from collections.abc import Sequence

import numpy as np

from rollkv.config import SamplingParams
from rollkv.errors import UsageError

_FIRST_CANDIDATES = 512  # a nucleus rarely holds more, and sorting 512 of 150,000 logits is far cheaper than sorting them all


def check_sampling(params: SamplingParams) -> None:
    """Raises UsageError, naming the option, for a parameter that means nothing."""
    rules = (
        ("--temp", params.temperature, 0 <= params.temperature < math.inf, "0 (greedy) or more, such as 0.8"),
        ("--top-k", params.top_k, params.top_k >= 0, "0 (off) or more, such as 40"),
        ("--top-p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1 (off), such as 0.95"),
        ("--min-p", params.min_p, 0 <= params.min_p <= 1, "between 0 (off) and 1, such as 0.05"),
        ("--repeat-penalty", params.repeat_penalty, 0 < params.repeat_penalty < math.inf, "above 0 (1 is off), such as 1.1"),
        ("--repeat-last", params.repeat_last, params.repeat_last >= 0, "0 (off) or more, such as 64"),
        ("--seed", params.seed, params.seed >= 0, "0 or more"),
    )
    for option, value, sound, wanted in rules:
        if not sound:  # NaN fails every comparison, so it ends here too
            raise UsageError(f"{option} {value}: the value must be {wanted}")


class Sampler:
    """Draws token ids under fixed parameters from a seeded generator of its own (PCG64). Raises UsageError for bad parameters."""

    def __init__(self, params: SamplingParams) -> None:
        check_sampling(params)
        self.params = params
        self._generator = np.random.Generator(np.random.PCG64(params.seed))

    def sample(self, logits: np.ndarray, history: Sequence[int] = ()) -> int:
        """The next id. logits float32 [vocab], not changed; history: all ids so far, prompt included, of which the last
        `repeat_last` are penalised. Uses one random number if the temperature is above zero and none if it is zero."""
        params = self.params
        if params.repeat_penalty != 1.0 and params.repeat_last and len(history):
            logits = penalize_repeats(logits, history[-params.repeat_last :], params.repeat_penalty)
        if params.temperature == 0:
            return int(np.argmax(logits))  # argmax returns the first, hence lowest, of equals
        ids, probabilities = candidates(logits, params)
        cumulative = np.cumsum(probabilities)
        index = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(ids[min(int(index), len(ids) - 1)])


def penalize_repeats(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """A copy of the logits with every id of `recent` made less likely once, however often it occurs: positive logits divided by the
    penalty, others multiplied by it (CTRL, Keskar et al. 2019, with the sign handled). float32 [vocab] to float32 [vocab]."""
    out = logits.copy()
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    values = out[ids]
    out[ids] = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    return out


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """What is left to draw from: ids int64 [n], ranked, and their probabilities float64 [n] at the temperature, which sum to 1.

    top_k keeps the k best; top_p the shortest ranked prefix whose probability reaches p (Holtzman et al. 2019); min_p those with at
    least min_p times the best probability. At least one token is always left.
    """
    count = min(params.top_k or len(logits), len(logits))
    if params.top_p < 1:
        ids, exact = _nucleus(logits, count, params.top_p)
    else:
        ids = top_ids(logits, count)
        exact = logits[ids].astype(np.float64)
    if params.min_p > 0:
        keep = int(np.count_nonzero(np.exp(exact - exact[0]) >= params.min_p))
        ids, exact = ids[:keep], exact[:keep]
    weights = np.exp((exact - exact[0]) / params.temperature)
    return ids, weights / weights.sum()


def _nucleus(logits: np.ndarray, count: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """The ranked prefix, among the `count` best tokens, that reaches top_p, with its logits as float64. Sorts a small number of
    candidates first and more only when these do not reach."""
    if count < len(logits):
        pool = logits[top_ids(logits, count)].astype(np.float64)
    else:
        pool = logits.astype(np.float64)
    best = float(pool.max())
    total = float(np.exp(pool - best).sum())
    size = min(count, _FIRST_CANDIDATES)
    while True:
        ids = top_ids(logits, size)
        exact = logits[ids].astype(np.float64)
        reached = np.cumsum(np.exp(exact - best)) >= top_p * total
        if reached.any():
            keep = int(np.argmax(reached)) + 1
            return ids[:keep], exact[:keep]
        if size == count:  # rounding in the sums can leave the last token just short of top_p
            return ids, exact
        size = min(count, size * 8)


def top_ids(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest logits, int64 [count]: best first, the lower id first among equals, also at the cut."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.concatenate([above[np.argsort(-logits[above], kind="stable")], equal])
