"""The table that logit-equiv prints, and the lines below it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollkv.metrics import Limits
    from rollkv.tasks.generate import TextModel
    from rollkv.tasks.logit_equiv import EquivRow


def result_text(model: "TextModel", rows: "list[EquivRow]", shared: dict[str, Any]) -> str:
    from rollkv import report
    from rollkv.dual_chunk import short_words

    headers = ("", "candidate", "in tail", "equal rows", "max diff", "NMSE", "KLD mean", "99.9 %", "max", "TV mean", "same top", "real", "")
    lines = [(str(number), *_line(row)) for number, row in enumerate(rows, 1)]
    parts = [
        f"{model.path.name}, {short_words(model.config)}, {shared['num_tokens']} tokens, the last {shared['decode_tokens']} one by one; reference: {shared['reference']}{part_seen(rows, shared)}",
        report.table(lines, headers, ("right", "left", *["right"] * (len(headers) - 3), "left")),
    ]
    below = _limit_lines([row.limits for row in rows])
    below += [_difference(model, row) for row in rows if row.comparison.first_difference]
    return "\n\n".join((*parts, "\n".join(below)))


def _limit_lines(limits: "Sequence[Limits]") -> list[str]:
    """One line for each set of limits, with the numbers of the candidates that must keep it: their names are long."""
    holders: dict[Limits, list[int]] = {}
    for number, one in enumerate(limits, 1):
        holders.setdefault(one, []).append(number)
    if len(holders) == 1:
        return [f"limits: {limits[0].words()}"]
    return [f"limits of candidate{'s' * (len(numbers) > 1)} {_numbers(numbers)}: {one.words()}" for one, numbers in holders.items()]


def _numbers(rising: Sequence[int]) -> str:
    """ "1 to 3, 5": neighbours together."""
    spans: list[tuple[int, int]] = []
    for number in rising:
        first = spans.pop()[0] if spans and spans[-1][1] == number - 1 else number
        spans.append((first, number))
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)


def part_seen(rows: "list[EquivRow]", shared: dict[str, Any]) -> str:
    """What to say where the reference does not hold the logits of all tokens."""
    seen, tokens = rows[0].comparison.rows, shared["num_tokens"]
    return "" if seen == tokens else f"; {seen} of {tokens} positions compared"


def _line(row: "EquivRow") -> tuple[str, ...]:
    found = row.comparison
    figures = (found.max_abs, found.nmse, found.kld_mean, found.kld_p999, found.kld_max, found.tv_mean)
    return (
        row.spec.label,
        str(row.tail_cells),
        f"{found.bit_equal_rows}/{found.rows}",
        *(f"{value:.2g}" for value in figures),
        f"{100 * found.full_agreement:.2f} %",
        f"{100 * found.real_frac:.2f} %",
        ("ok" if row.judged else "not judged") if row.passed else "FAILED",
    )


def _difference(model: "TextModel", row: "EquivRow") -> str:
    """The first other top token, and whether it was a tie."""
    first, noise = row.comparison.first_difference, row.comparison.noise
    assert first is not None
    want, got = (model.tokenizer.quoted(token) for token in (first.reference_token, first.candidate_token))
    if first.margin is None:
        weight = "the reference's margin there is not known"
    else:
        kind = "a tie within" if first.margin <= noise else "beyond"
        weight = f"the reference's margin there is {first.margin:.3g}, {kind} the noise of {noise:g}"
    return f"{row.spec.label}: first other top token at position {first.position}, {got} instead of {want}; {weight}"
