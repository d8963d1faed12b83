"""Does the data fit the model and the loss? Asked once, before any training."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from rarebit.data.dataset import Dataset
from rarebit.data.schema import Field
from rarebit.errors import DataError
from rarebit.models._base import RankingModel

__all__ = ["check_counts", "check_labels", "check_schema"]


def check_schema(model: nn.Module, data: Dataset) -> None:
    """Raise when a model of ours was built for other fields than the data has."""
    if not isinstance(model, RankingModel) or model.schema == data.schema:
        return
    built_for = {field.name: field for field in model.schema.fields}
    for field in data.schema.fields:
        known = built_for.get(field.name)
        if known is not None and _has_other_values(known, field):
            raise DataError(
                f"the model was trained with another vocabulary of {field.name!r} than the data has: "
                "the same id means another value. Encode the rows with the model's own vocabulary: "
                "rarebit predict --model RUN --input FILE, or Dataset.from_frame(frame, like=data)"
            )
        if known != field:
            raise DataError(
                "the model was built for other data: "
                f"it has {built_for.get(field.name, f'no field {field.name!r}')}, "
                f"the data has {field}"
            )
    raise DataError(
        f"the model was built for other data: it has the fields {list(built_for)}, "
        f"the data has {[field.name for field in data.schema.fields]}"
    )


def _has_other_values(known: Field, field: Field) -> bool:
    """Return whether the ids of a field stand for other raw values, whatever else is the same."""
    both_marked = bool(known.vocabulary and field.vocabulary)
    only_marks_differ = replace(known, vocabulary=field.vocabulary) == field
    return known.vocabulary != field.vocabulary and (both_marked or only_marks_differ)


def check_counts(data: Dataset, counts: Mapping[str, Tensor]) -> None:
    """Raise when training counts do not belong to the data's fields."""
    for field in data.schema.table_fields:
        count = counts.get(field.name)
        if count is None or len(count) != field.rows:
            came = "none" if count is None else f"{len(count)}"
            raise DataError(
                f"counts need one number for each of the {field.rows} ids of {field.name!r}, got "
                f"{came}; take them from the training split: counts=train.counts()"
            )


def check_labels(data: Dataset, name: str, *, are_chances: bool, both_classes: bool) -> None:
    """Raise when labels cannot be learned from or ranked by. `name` is what to call the data."""
    lowest, highest = (float(bound) for bound in torch.aminmax(data.label))
    if are_chances and not 0.0 <= lowest <= highest <= 1.0:
        raise DataError(
            f"labels must lie in [0, 1] for this loss, the {name} data has "
            f"{lowest:g} to {highest:g}; pass loss= for other targets"
        )
    if both_classes and (highest <= 0.5 or lowest > 0.5):
        raise DataError(
            f"all {len(data):,} labels of the {name} data are of one class "
            f"({'clicked' if lowest > 0.5 else 'not clicked'}), so AUC is undefined and there is "
            "nothing to learn to rank; check the label column and the split"
        )
