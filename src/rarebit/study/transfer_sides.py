"""What harmless transfer is held against: the same transfer without its barrier, and its barrier without it.

plain-sum       both gradients added, at the scale that is best on validation
doubled-rows    a transfer gradient of zero: the barrier alone, which makes the rows' gradients larger
"""

import dataclasses
from typing import Any

from rarebit.methods import method_text
from rarebit.methods.harmless_transfer import Transfer
from rarebit.settings import require
from rarebit.tables.table import method_name
from rarebit.training.run_settings import RunSettings

__all__ = [
    "DOUBLED_ROWS",
    "PLAIN_SUM",
    "doubled_rows",
    "has_barrier",
    "plain_sums",
    "require_transfer",
    "without_transfer",
]

PLAIN_SUM, DOUBLED_ROWS = "plain-sum", "doubled-rows"
SCALES = (0.01, 0.1, 1.0, 10.0)
"""What the transfer gradient of a plain sum is multiplied by; validation picks."""


def plain_sums(settings: RunSettings) -> tuple[str, tuple[RunSettings, ...]]:
    """Return the name of the plain sum of a run's transfer, and the settings to try.

    >>> name, trials = plain_sums(RunSettings(methods=(Transfer(loss="mmd"),)))
    >>> name, [method_text(method) for method in trials[0].methods]
    ('plain-sum:loss=mmd', ['harmless-transfer:loss=mmd:rule=sum:scale=0.01'])
    """
    # alpha is that of the barrier, which a sum has none of
    trials = [_changed(settings, rule="sum", scale=scale, alpha=Transfer.alpha) for scale in SCALES]
    return _name(trials[0], PLAIN_SUM), tuple(trials)


def doubled_rows(settings: RunSettings) -> tuple[str, RunSettings]:
    """Return the same run with a transfer gradient of zero, and its name.

    >>> doubled_rows(RunSettings(methods=(Transfer(fields="zip"),)))[0]
    'doubled-rows:fields=zip'
    """
    found = _changed(settings, scale=0.0)
    return _name(found, DOUBLED_ROWS), found


def has_barrier(settings: RunSettings) -> bool:
    """Return whether a run's transfer is more than a plain sum, and more than its barrier.

    >>> has_barrier(RunSettings(methods=(Transfer(),)))
    True
    """
    return any(
        method.rule != "sum" and method.scale > 0
        for method in settings.methods
        if isinstance(method, Transfer)
    )


def without_transfer(settings: RunSettings) -> RunSettings:
    """Return the same run without its transfer.

    >>> without_transfer(RunSettings(methods=(Transfer(),))).methods
    ()
    """
    methods = tuple(method for method in settings.methods if not isinstance(method, Transfer))
    return dataclasses.replace(settings, methods=methods)


def require_transfer(name: str, settings: RunSettings, control: str) -> None:
    """Raise where a side has no transfer to be held against a control of transfers."""
    require(
        any(isinstance(method, Transfer) for method in settings.methods),
        f"{name} has no transfer, which {control} is a control for; use harmless-transfer, or name another "
        "control, such as --control baseline",
    )


def _changed(settings: RunSettings, **changes: Any) -> RunSettings:
    methods = tuple(
        dataclasses.replace(method, **changes) if isinstance(method, Transfer) else method
        for method in settings.methods
    )
    return dataclasses.replace(settings, methods=methods)


def _name(settings: RunSettings, word: str) -> str:
    """Return the name of a side whose transfer goes by another word, which says its rule and scale."""
    usual = _changed(settings, rule=Transfer.rule, scale=Transfer.scale)
    return "+".join(
        method_text(method).replace(method_name(method), word, 1)
        if isinstance(method, Transfer)
        else method_text(method)
        for method in usual.methods
    )
