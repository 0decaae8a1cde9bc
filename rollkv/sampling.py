"""Choosing the next token: a pure function of one row of logits, the ids so far, the parameters and the position.

The steps, in this order: repeat penalty, top-k, top-p, min-p, temperature, draw. Every filter sees the candidates that the one before
left, renormalised. Tokens are ranked by logit, and equal logits by the lower id, so that a result never depends on how a sort happens
to break ties. The random number of a draw is made from seed and position alone (split_mix.py): no state is kept, and a position's token
does not depend on what was drawn before.

This is the definition, to the bit, of what csrc/choose.cu computes. A token's weight, exp((logit - best) / temperature), is made by float64
operations that every machine rounds alike and is kept as a whole number of 2^-40; from there on everything is integers, whose sums do not
depend on their order. Logits must be finite; whoever computed them answers for that.
"""

import math
from collections.abc import Sequence

import numpy as np

from rollkv import split_mix
from rollkv.config import SamplingParams
from rollkv.errors import UsageError

WEIGHT_BITS = 40  # the best token weighs 2^40; sums over up to 2^23 tokens fit 63 bits
_LARGEST = np.finfo(np.float32).max
_LOG2_E = 1.4426950408889634
# 2^x = sum of _EXP2[k] x^k, _EXP2[k] = ln(2)^k / k!: at |x| <= 1/2 off by 2.2e-13, less than half of 2^-40.
_EXP2 = (
    1.0, 0.6931471805599453, 0.24022650695910072, 0.05550410866482158, 0.009618129107628477, 0.0013333558146428443,
    0.0001540353039338161, 1.5252733804059841e-05, 1.321548679014431e-06, 1.01780860092397e-07, 7.054911620801123e-09,
)  # fmt: skip
_SHARPEST = 1e250
_LEAST = -64.0  # powers of two below round to nothing
_FIRST_CANDIDATES = 512  # a nucleus rarely holds more, and sorting 512 of 150,000 logits is far cheaper than sorting them all


def check_sampling(params: SamplingParams) -> None:
    """Raises UsageError, naming the option, for a parameter that means nothing."""
    rules = (
        ("--temp", params.temperature, 0 <= params.temperature < math.inf, "0 (greedy) or more, such as 0.8"),
        ("--top-k", params.top_k, params.top_k >= 0, "0 (off) or more, such as 40"),
        ("--top-p", params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1 (off), such as 0.95"),
        ("--min-p", params.min_p, 0 <= params.min_p <= 1, "between 0 (off) and 1, such as 0.05"),
        ("--repeat-penalty", params.repeat_penalty, 1e-30 <= params.repeat_penalty <= 1e30, "from 1e-30 to 1e30 (1 is off), such as 1.1"),
        ("--repeat-last", params.repeat_last, params.repeat_last >= 0, "0 (off) or more, such as 64"),
    )
    for option, value, sound, wanted in rules:
        if not sound:  # NaN fails every comparison, so it ends here too
            raise UsageError(f"{option} {value}: the value must be {wanted}")
    check_seed(params.seed)


def check_seed(seed: int) -> None:
    """Raises UsageError for a seed that split_mix.py does not take."""
    if not 0 <= seed < 1 << 64:
        raise UsageError(f"--seed {seed}: the value must be from 0 to 2^64 - 1")


def choose(logits: np.ndarray, history: Sequence[int] | np.ndarray, params: SamplingParams, position: int) -> int:
    """The id that follows. logits float32 [vocab], not changed; history: all ids so far, prompt included, of which the last
    `repeat_last` are penalised; position: the cell whose logits these are, which together with the seed makes the random number."""
    if params.repeat_penalty != 1.0 and params.repeat_last and len(history):
        logits = penalize_repeats(logits, history[-params.repeat_last :], params.repeat_penalty)
    if params.temperature == 0:
        return int(np.argmax(logits))  # argmax returns the first, hence lowest, of equals
    ids, token_weights = candidates(logits, params)
    cumulative = np.cumsum(token_weights)
    drawn = split_mix.word(params.seed, position) * int(cumulative[-1]) >> 64  # uniform from 0 to the sum - 1
    return int(ids[np.searchsorted(cumulative, np.uint64(drawn), side="right")])


def penalize_repeats(logits: np.ndarray, recent: Sequence[int] | np.ndarray, penalty: float) -> np.ndarray:
    """A copy of the logits with every id of `recent` made less likely once, however often it occurs: positive logits divided by the
    penalty, others multiplied by it (CTRL, Keskar et al. 2019, with the sign handled). float32 [vocab] to float32 [vocab], finite."""
    out = logits.copy()
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    values = out[ids]
    with np.errstate(over="ignore"):
        penalised = np.where(values > 0, values / np.float32(penalty), values * np.float32(penalty))
    out[ids] = np.clip(penalised, -_LARGEST, _LARGEST)
    return out


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """What is left to draw from: ids int64 [n], ascending, and their weights at the temperature, uint64 [n].

    top_k keeps the k best; top_p the shortest ranked prefix whose probability reaches p (Holtzman et al. 2019); min_p those with at
    least min_p times the best probability. At least one token is always left.
    """
    count, best = min(params.top_k or len(logits), len(logits)), logits.max()
    if params.top_p < 1:
        ids = _nucleus(logits, count, params.top_p)
    elif count < len(logits):
        ids = top_ids(logits, count)
    else:
        ids = np.arange(len(logits))
    ids = np.sort(ids[_behind(logits[ids], best) >= log_min_p(params)])
    return ids, weights(logits[ids], best, sharpness(params.temperature))


def weights(logits: np.ndarray, best: np.float32, factor: float) -> np.ndarray:
    """2^((logits - best) * factor) in units of 2^-WEIGHT_BITS, uint64, for logits up to `best`: one multiplication or addition at a time, each
    rounded to float64."""
    power = np.maximum(_behind(logits, best) * factor, _LEAST)
    whole = np.rint(power)
    rest = power - whole
    value = np.full_like(rest, _EXP2[-1])
    for coefficient in _EXP2[-2::-1]:
        value = value * rest + coefficient
    return np.rint(np.ldexp(value, whole.astype(np.int32) + WEIGHT_BITS)).astype(np.uint64)


def sharpness(temperature: float) -> float:
    """What differences of logits are multiplied by to give powers of two: never so large that a product is not finite."""
    return min(_LOG2_E / temperature, _SHARPEST)


def log_min_p(params: SamplingParams) -> float:
    """The least logit that min_p leaves, relative to the best."""
    return math.log(params.min_p) if params.min_p > 0 else -math.inf


def mass_to_reach(total: int, top_p: float) -> int:
    """The least sum of weights that makes up the share top_p of the total: from 1 to total."""
    return min(max(math.ceil(top_p * float(total)), 1), total)


def _behind(logits: np.ndarray, best: np.float32) -> np.ndarray:
    return logits.astype(np.float64) - np.float64(best)


def _nucleus(logits: np.ndarray, count: int, top_p: float) -> np.ndarray:
    """The ranked prefix, among the `count` best tokens, that reaches top_p. Sorts a small number of candidates first and more only when
    these do not reach."""
    best, factor = logits.max(), sharpness(1.0)
    pool = logits if count == len(logits) else logits[top_ids(logits, count)]
    wanted = np.uint64(mass_to_reach(int(weights(pool, best, factor).sum()), top_p))
    size = min(count, _FIRST_CANDIDATES)
    while True:
        ids = top_ids(logits, size)
        keep = int(np.searchsorted(np.cumsum(weights(logits[ids], best, factor)), wanted)) + 1
        if keep <= size:
            return ids[:keep]
        size = min(count, size * 8)


def top_ids(logits: np.ndarray, count: int) -> np.ndarray:
    """The ids of the `count` largest logits, int64 [count]: best first, the lower id first among equals, also at the cut."""
    if count >= len(logits):
        return np.argsort(-logits, kind="stable")
    threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.concatenate([above[np.argsort(-logits[above], kind="stable")], equal])
