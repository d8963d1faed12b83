"""Every method on models of other libraries: does each train, merge and load as it should, or say why not?

    python benchmarks/strangers.py --environments DIR --out benchmarks/results/strangers.json
    python benchmarks/strangers.py --environments DIR --only recbole,fuxictr
    python benchmarks/strangers.py --show benchmarks/results/strangers.json

Each library is installed with pip into an environment of its own below DIR (nothing else on the machine changes), with
the torch that runs this where it allows that, and its models are trained by its own `fit`, where it has one. A cell is one method on one
model:

    still       tables that plain training moves, and training with the method does not: none
    merge       largest difference of the outputs after `merge_`
    load        largest difference of the outputs after `save_model` and `load_model(into=...)`
    refused     Rarebit's error: one sentence that says what to do instead

Methods around training, and row-wise Adam, run in a loop of our own. Two more rows check row rules: `zero rule` must
leave all tables where they are, and `sum rule` must train as without it. A cell fails with any other error, with a
table that stands still, or with outputs that differ by more than 1e-5; the command then ends with status 1.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.optim import Optimizer

import rarebit as rb
from rarebit.callbacks import Callback, TrainingData, TrainingMethod
from rarebit.data.schema import Field, Schema
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.sets.sets import SetsMethod
from rarebit.tables.apply import find_tables
from rarebit.tables.table import Method
from rarebit.technique import Technique, technique_class, technique_names

USERS, ITEMS, DIM, BATCH, STEPS = 240, 160, 8, 64, 6
LR = 0.01
LARGEST_DIFFERENCE, LEAST_MOVE = 1e-5, 1e-5
"""Of outputs that should be equal: sums in float32, in another order. Of an entry of a trained table."""

Loss = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class Stranger:
    """A model of another library."""

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    """The loss of a numbered batch, for a loop of one's own."""
    output: Callable[[nn.Module], Any]
    fit: Callable[[nn.Module], object] | None = None
    """The library's own training of a few steps; by default a loop with Adam."""
    wrap: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)
    """What wraps the model for training, as `torch.compile` does."""
    untie: bool = False
    """Whether a table is tied to an output layer, and gets a copy of its weight."""
    sharded: bool = False
    """Whether the wrapped model holds shards, so that its state is gathered after training."""


def clicks() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return users, items and labels of a small log; frequent ids come first."""
    random = np.random.default_rng(0)
    draw = lambda rows: np.minimum(random.geometric(8 / rows, BATCH * STEPS) - 1, rows - 1)  # noqa: E731
    columns = {"user": draw(USERS), "item": draw(ITEMS)}
    label = (columns["user"] + columns["item"]) % 3 == 0
    return columns, label.astype(np.float32)


def batch(number: int) -> slice:
    """Return the rows of a numbered batch."""
    start = number % STEPS * BATCH
    return slice(start, start + BATCH)


# --- the models


def torch_rechub() -> Iterator[Stranger]:
    """Ranking models, and one of sequences whose table is shared."""
    from torch.utils.data import DataLoader
    from torch_rechub.basic.features import SparseFeature
    from torch_rechub.models.ranking import DCNv2, DeepFM
    from torch_rechub.trainers import CTRTrainer
    from torch_rechub.utils.data import TorchDataset

    columns, label = clicks()
    features = lambda: [  # noqa: E731
        SparseFeature("user", USERS, embed_dim=DIM),
        SparseFeature("item", ITEMS, embed_dim=DIM),
    ]

    def loss(model: nn.Module, number: int) -> Tensor:
        rows = {name: torch.as_tensor(ids[batch(number)]) for name, ids in columns.items()}
        return nn.functional.binary_cross_entropy(
            model(rows).squeeze(), torch.as_tensor(label[batch(number)])
        )

    def fit(model: nn.Module) -> None:
        loader = DataLoader(TorchDataset(columns, label), batch_size=BATCH)
        trainer = CTRTrainer(model, optimizer_params={"lr": LR}, n_epoch=1)
        trainer.train_one_epoch(loader)

    def output(model: nn.Module) -> Tensor:
        return model({name: torch.as_tensor(ids) for name, ids in columns.items()})

    mlp = {"dims": [16], "dropout": 0.0}
    yield Stranger(
        "torch-rechub DeepFM", lambda: DeepFM(features(), features(), mlp), loss, output, fit
    )
    yield Stranger(
        "torch-rechub DCN-V2",
        lambda: DCNv2(features(), n_cross_layers=2, mlp_params=mlp),
        loss,
        output,
        fit,
    )


def deepctr_torch() -> Iterator[Stranger]:
    """Models that keep their tables in lists for L2."""
    from deepctr_torch.inputs import SparseFeat, VarLenSparseFeat
    from deepctr_torch.models import DIN, DeepFM

    columns, label = clicks()
    features = [
        SparseFeat("user", USERS, embedding_dim=DIM),
        SparseFeat("item", ITEMS, embedding_dim=DIM),
    ]
    history = np.stack([np.roll(columns["item"], shift) for shift in range(4)], axis=1)
    inputs = {
        "DeepFM": columns,
        "DIN": columns | {"hist_item": history, "length": np.full(len(label), 4)},
    }

    def build(name: str) -> nn.Module:
        if name == "DeepFM":
            model = DeepFM(features, features, dnn_hidden_units=(16,), l2_reg_embedding=1e-3)
        else:
            past = VarLenSparseFeat(
                SparseFeat("hist_item", ITEMS, DIM, embedding_name="item"), 4, length_name="length"
            )
            model = DIN([*features, past], ["item"], dnn_hidden_units=(16,), att_hidden_size=(8,))
        return model

    def fit(model: nn.Module, name: str) -> None:
        model.compile(torch.optim.Adam(model.parameters(), lr=LR), "binary_crossentropy")  # type: ignore[operator]
        model.fit(inputs[name], label, batch_size=BATCH, epochs=1, verbose=0)  # type: ignore[operator]

    def matrix(model: nn.Module, name: str, rows: slice) -> Tensor:
        parts = [inputs[name][part][rows] for part in model.feature_index]
        return torch.as_tensor(np.column_stack(parts)).float()

    for name in inputs:
        yield Stranger(
            f"DeepCTR-Torch {name}",
            lambda name=name: build(name),  # type: ignore[misc]
            lambda model, number, name=name: (  # type: ignore[misc]
                nn.functional.binary_cross_entropy(
                    model(matrix(model, name, batch(number))).squeeze(),
                    torch.as_tensor(label[batch(number)]),
                )
                + model.get_regularization_loss().sum()
            ),
            lambda model, name=name: model(matrix(model, name, slice(None))),  # type: ignore[misc]
            lambda model, name=name: fit(model, name),  # type: ignore[misc]
        )


def fuxictr() -> Iterator[Stranger]:
    """A model that builds its optimizer in `__init__`."""
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.layers import FactorizationMachine, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    columns, label = clicks()
    folder = Path(tempfile.mkdtemp())
    spec = {"source": "", "type": "categorical"}
    sizes = {"user": USERS, "item": ITEMS}
    features = [{name: spec | {"vocab_size": rows}} for name, rows in sizes.items()]
    text = {"dataset_id": "log", "labels": ["label"], "features": features}
    (folder / "feature_map.json").write_text(json.dumps(text))
    described = FeatureMap("log", str(folder))
    described.load(str(folder / "feature_map.json"), {"embedding_dim": DIM})

    class DeepFM(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(
                described,
                embedding_regularizer="l2(1e-4)",
                verbose=0,
                model_root=str(folder),
                metrics=["AUC"],
            )
            self.embedding_layer = FeatureEmbedding(described, DIM)
            self.fm = FactorizationMachine(described)
            self.mlp = MLP_Block(2 * DIM, [16], output_dim=1)
            self.compile("adam", "binary_crossentropy", LR)
            self.reset_parameters()

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            ids = self.get_inputs(inputs)
            fields = self.embedding_layer(ids)
            return {
                "y_pred": self.output_activation(self.fm(ids, fields) + self.mlp(fields.flatten(1)))
            }

        def eval_step(self) -> None:
            self.save_weights(self.checkpoint)

    def rows(part: slice) -> dict[str, Tensor]:
        table = {name: torch.as_tensor(ids[part]) for name, ids in columns.items()}
        return table | {"label": torch.as_tensor(label[part])}

    def loss(model: nn.Module, number: int) -> Tensor:
        found = rows(batch(number))
        return model.compute_loss(model(found), model.get_labels(found))  # type: ignore[operator]

    def fit(model: nn.Module) -> None:
        Path(model.model_dir).mkdir(exist_ok=True)  # type: ignore[arg-type]
        model.fit([rows(batch(number)) for number in range(STEPS)], epochs=1)  # type: ignore[operator]

    yield Stranger(
        "FuxiCTR DeepFM", DeepFM, loss, lambda model: model(rows(slice(None)))["y_pred"], fit
    )


def recbole() -> Iterator[Stranger]:
    """Models that score by `x @ table.weight.T`, and one that uses nothing but the weights."""
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import get_model, get_trainer

    folder = Path(tempfile.mkdtemp())
    (folder / "log").mkdir()
    lines = ["user_id:token\titem_id:token\ttimestamp:float"]
    lines += [f"u{t % 120}\ti{(t * 37 + t // ITEMS) % ITEMS}\t{t}" for t in range(600)]
    (folder / "log" / "log.inter").write_text("\n".join(lines))
    for name in ("SASRec", "GRU4Rec", "BPR", "LightGCN"):
        settings = {
            "data_path": str(folder),
            "checkpoint_dir": str(folder),
            "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
            "epochs": 1,
            "train_batch_size": BATCH,
            "learning_rate": LR,
            "embedding_size": DIM,
            "hidden_size": DIM,
            "train_neg_sample_args": None
            if name in ("SASRec", "GRU4Rec")
            else {
                "distribution": "uniform",
                "sample_num": 1,
                "dynamic": False,
                "alpha": 1.0,
                "candidate_num": 0,
            },
            "show_progress": False,
            "state": "ERROR",
            "use_gpu": False,
        }
        config = Config(model=name, dataset="log", config_dict=settings)
        train, _, _ = data_preparation(config, create_dataset(config))
        batches = list(train)[:STEPS]
        made = get_model(name)

        def build(config: Any = config, train: Any = train, made: Any = made) -> nn.Module:
            model: nn.Module = made(config, train._dataset)  # noqa: SLF001  # as its quick start does
            for part in model.modules():  # its padding rows are not zero, and apply_ asks for that
                if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                    part.weight.data[part.padding_idx] = 0
            return model

        def fit(model: nn.Module, config: Any = config, train: Any = train) -> None:
            trainer = get_trainer(config["MODEL_TYPE"], config["model"])(config, model)
            trainer.fit(train, saved=False, show_progress=False, verbose=False)

        def loss(model: nn.Module, number: int, batches: Any = batches) -> Tensor:
            return model.calculate_loss(batches[number % len(batches)])  # type: ignore[operator, no-any-return]

        def output(model: nn.Module, batches: Any = batches) -> Any:
            if hasattr(model, "restore_user_e"):
                model.restore_user_e = model.restore_item_e = None  # scores kept from another state
            return model.full_sort_predict(batches[0])  # type: ignore[operator]

        yield Stranger(f"RecBole {name}", build, loss, output, fit)


def pytorch_widedeep() -> Iterator[Stranger]:
    """Models of tables and columns, trained by a `Trainer`."""
    from pytorch_widedeep import Trainer
    from pytorch_widedeep.models import TabMlp, TabTransformer, WideDeep

    columns, label = clicks()
    matrix = np.column_stack([columns["user"] + 1, columns["item"] + 1])
    index = {"user": 0, "item": 1}
    sizes = [("user", USERS + 1), ("item", ITEMS + 1)]

    def build(name: str) -> nn.Module:
        if name == "TabMlp":
            part: nn.Module = TabMlp(
                index,
                cat_embed_input=[(*one, DIM) for one in sizes],
                mlp_hidden_dims=[16],
                cat_embed_dropout=0.0,
            )
        else:
            part = TabTransformer(
                index, cat_embed_input=sizes, input_dim=DIM, n_heads=2, n_blocks=1
            )
        return WideDeep(deeptabular=part)  # type: ignore[no-any-return]

    def loss(model: nn.Module, number: int) -> Tensor:
        rows = batch(number)
        logit = model({"deeptabular": torch.as_tensor(matrix[rows])}).squeeze()
        return nn.functional.binary_cross_entropy_with_logits(logit, torch.as_tensor(label[rows]))

    def fit(model: nn.Module) -> None:
        adam = torch.optim.Adam(model.parameters(), lr=LR)
        trainer = Trainer(model, objective="binary", optimizers=adam, verbose=0, num_workers=0)
        trainer.fit(X_tab=matrix, target=label, n_epochs=1, batch_size=BATCH)

    for name in ("TabMlp", "TabTransformer"):
        yield Stranger(
            f"pytorch-widedeep {name}",
            lambda name=name: build(name),  # type: ignore[misc]
            loss,
            lambda model: model({"deeptabular": torch.as_tensor(matrix)}),
            fit,
        )


def hugging_face() -> Iterator[Stranger]:
    """Small language models with random weights, tied and not."""
    import transformers

    text = torch.as_tensor(clicks()[0]["item"]).view(STEPS, -1, 16)
    small = {
        "vocab_size": ITEMS,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    small |= {"intermediate_size": 32, "max_position_embeddings": 32}
    gpt = {"vocab_size": ITEMS, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    makes: dict[str, Callable[[], nn.Module]] = {
        "BERT": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**small)),
        "RoBERTa": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**small)),
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small)),
        "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt)),
        "BERT classifier": lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(**small)
        ),
    }

    def loss(model: nn.Module, number: int, classify: bool) -> Tensor:
        rows = text[number % STEPS]
        labels = rows[:, 0] % 2 if classify else rows
        return model(input_ids=rows, labels=labels).loss  # type: ignore[no-any-return]

    for name, make in makes.items():
        yield Stranger(
            f"Hugging Face {name}",
            make,
            lambda model, number, classify="classifier" in name: loss(model, number, classify),  # type: ignore[misc]
            lambda model: model(input_ids=text[0]).logits,
            untie=name in ("BERT", "RoBERTa", "GPT-2"),
        )


class Plain(nn.Module):
    """Two tables and a network, for what wraps a model."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, DIM)
        self.item = nn.Embedding(ITEMS, DIM)
        self.network = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return the logits of clicks."""
        return self.network(torch.cat([self.user(user), self.item(item)], dim=1)).squeeze(1)


def plain_loss(model: nn.Module, number: int) -> Tensor:
    """Return the loss of `Plain`, however it is wrapped."""
    (columns, label), rows = clicks(), batch(number)
    user, item = (torch.as_tensor(ids[rows]) for ids in columns.values())
    return nn.functional.binary_cross_entropy_with_logits(
        model(user, item), torch.as_tensor(label[rows])
    )


def plain_output(model: nn.Module) -> Any:
    """Return the outputs of `Plain`, however it is wrapped."""
    return model(*(torch.as_tensor(ids) for ids in clicks()[0].values()))


def lightning() -> Iterator[Stranger]:
    """A LightningModule, trained by its Trainer."""
    import lightning as lt
    from torch.utils.data import DataLoader, TensorDataset

    columns, label = clicks()

    class Module(lt.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Plain()

        def forward(self, user: Tensor, item: Tensor) -> Tensor:
            return self.model(user, item)  # type: ignore[no-any-return]

        def training_step(self, rows: Sequence[Tensor], _: int) -> Tensor:
            user, item, clicked = rows
            return nn.functional.binary_cross_entropy_with_logits(self(user, item), clicked)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=LR)

    def fit(model: nn.Module) -> None:
        tensors = [torch.as_tensor(part) for part in (*columns.values(), label)]
        trainer = lt.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
            devices=1,
        )
        trainer.fit(model, DataLoader(TensorDataset(*tensors), batch_size=BATCH))

    yield Stranger("Lightning", Module, plain_loss, plain_output, fit)


def torch_wrappers() -> Iterator[Stranger]:
    """What torch wraps a model with, around a model that has its methods already."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    wraps: dict[str, Callable[[nn.Module], Any]] = {
        "torch": lambda model: model,
        "torch.compile": torch.compile,
        "DataParallel": nn.DataParallel,
        "DDP": DistributedDataParallel,
        "FSDP2": fully_shard,
    }
    for name, wrap in wraps.items():
        yield Stranger(name, Plain, plain_loss, plain_output, wrap=wrap, sharded=name == "FSDP2")


LIBRARIES: dict[str, tuple[Callable[[], Iterator[Stranger]], tuple[str, ...]]] = {
    "torch": (torch_wrappers, ()),
    "lightning": (lightning, ("lightning",)),
    "torch-rechub": (torch_rechub, ("torch-rechub",)),
    "deepctr-torch": (deepctr_torch, ("deepctr-torch", "requests")),
    "fuxictr": (fuxictr, ("fuxictr",)),
    "recbole": (recbole, ("recbole", "numpy<2", "pandas<3", "scipy<1.12")),
    "pytorch-widedeep": (pytorch_widedeep, ("pytorch-widedeep", "torchvision")),
    "hugging-face": (hugging_face, ("transformers",)),
}
"""Each library's models, and what pip installs for them."""


# --- the cells


def tables(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every table of a model, as full tables."""
    return {
        table.name: model.get_submodule(table.name).weight.detach().clone()  # type: ignore[union-attr, operator]
        for table in find_tables(model)
    }


def moved(before: dict[str, Tensor], after: dict[str, Tensor], name: str) -> float:
    """Return how far an entry of a table moved at most."""
    return float((after[name] - before[name]).abs().max()) if before[name].numel() else 0.0


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two outputs."""
    return float((one - other).abs().max())


@torch.no_grad()
def outputs(stranger: Stranger, model: nn.Module) -> Any:
    """Return what a model says in evaluation."""
    model.eval()
    return stranger.output(model).detach().clone()


def train(
    stranger: Stranger,
    model: nn.Module,
    method: TrainingMethod | None = None,
    make: Callable[[nn.Module], Optimizer] | None = None,
) -> nn.Module:
    """Train a few steps by the library's `fit`, or in our own loop with a method or an optimizer; return the model."""
    model.train()
    if stranger.fit is not None and method is None and make is None:
        stranger.fit(model)
        return model
    whole = copy.deepcopy(model) if stranger.sharded else model
    callback = Callback() if method is None else method.start(model, training_data(model))
    wrapped = stranger.wrap(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=LR) if make is None else make(wrapped)
    for step in range(2 * STEPS):
        if step == STEPS:
            callback.between_epochs(1, optimizer)
        loss = stranger.loss(wrapped, step)
        if callback.backward is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            callback.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        callback.after_step(step + 1)
    callback.end()
    callback.close()
    if stranger.sharded:
        gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        whole.load_state_dict(gathered)
    return whole


def training_data(model: nn.Module) -> TrainingData:
    """Return a log whose columns have the names of the tables: methods count ids in it."""
    columns, label = clicks()
    found = {table.name: table.rows for table in find_tables(model)}
    schema = Schema(tuple(Field(name=name, rows=rows) for name, rows in found.items()))
    ids = columns["user"]
    log = rb.Dataset.from_columns(
        {name: torch.as_tensor(ids % rows) for name, rows in found.items()},
        label=torch.as_tensor(label),
        schema=schema,
    )
    return TrainingData(train=log, valid=None, batch_size=BATCH, steps_per_epoch=STEPS, seed=0)


def settings_of(name: str, model: nn.Module) -> Technique:
    """Return a method in the size that suits the tables, with counts where it takes them."""
    found = [table for table in find_tables(model) if table.width > 1]
    method = technique_class(name).for_share([(t.rows, t.width) for t in found], 0.5)
    if hasattr(method, "counts"):
        counts = {t.name: torch.arange(t.rows).flip(0) % 50 for t in find_tables(model)}
        method = type(method)(counts=counts)  # type: ignore[call-arg]
    return method


def cell(stranger: Stranger, way: str, plain: Sequence[str]) -> dict[str, Any]:
    """Return what one method did on one model; `plain` are the tables that plain training moves."""
    torch.manual_seed(0)
    model = stranger.build()
    if way in RULES:
        return {"difference": row_rule(stranger, model, way)}
    before = tables(model)
    if way == BASELINE:
        after = tables(train(stranger, model))
        return {"moved": [name for name in before if moved(before, after, name) > LEAST_MOVE]}
    method = None if way in OPTIMIZERS else settings_of("pruned" if way == "pack_" else way, model)
    around = method if isinstance(method, TrainingMethod) else None
    is_late = isinstance(method, Method) and method.after_training
    if is_late:
        model = train(stranger, model)
    if isinstance(method, Method):
        rb.apply_(model, method, untie=stranger.untie, verbose=False)
        before = tables(model)
    if not is_late:
        model = train(stranger, model, around, OPTIMIZERS.get(way))
    after = tables(model)
    if way == "pack_":
        rb.pack_(model, verbose=False)
    said = outputs(stranger, model)
    with tempfile.TemporaryDirectory() as folder:
        rb.save_model(model, folder)
        again = rb.load_model(folder, into=stranger.build())
    if isinstance(method, Method) and way != "pack_":
        rb.merge_(model, verbose=False)
    return {
        "still": [n for n in plain if not is_late and moved(before, after, n) <= LEAST_MOVE],
        "merge": difference(said, outputs(stranger, model)),
        "load": difference(said, outputs(stranger, again)),
    }


def row_rule(stranger: Stranger, model: nn.Module, way: str) -> float:
    """Train one step with a rule, and with what must do the same; return how far the tables are apart."""
    twin = copy.deepcopy(model)  # stays as it is where the rule is zero
    for one, rule in ((model, RULES[way]), (twin, None)):
        if one is twin and way == "zero rule":
            break
        one.train()
        seam = None if rule is None else rb.RowGradients(one, rule, min_width=1)
        wrapped = stranger.wrap(one)
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        torch.manual_seed(0)  # dropout
        loss = stranger.loss(wrapped, 0)
        loss.backward() if seam is None else seam.backward(loss)  # type: ignore[no-untyped-call]
        optimizer.step()
        if seam is not None:
            seam.close()
    found, expected = tables(model), tables(twin)
    return max(moved(expected, found, name) for name in expected)


BASELINE = "plain tables"
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zero rule": lambda ids, gradients: torch.zeros_like(gradients[0]),  # noqa: ARG005
    "sum rule": lambda ids, gradients: gradients.sum(dim=0),  # noqa: ARG005
}
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "row-wise Adam": lambda model: rb.optimizer(model, lr=LR, tables="rowwise")
}
WAYS = (BASELINE, *technique_names(), "pack_", *OPTIMIZERS, *RULES)


def run_library(name: str) -> None:
    """Print one line of JSON per cell."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make, requirements = LIBRARIES[name]
    packages = [re.split("[<=]", each)[0] for each in (*requirements[:1], "torch", "numpy")]
    real = sys.stdout
    print(json.dumps({"versions": {each: version(each) for each in packages}}), file=real)
    with contextlib.redirect_stdout(io.StringIO()):  # libraries print
        for stranger in make():
            plain: list[str] = []
            for way in WAYS:
                torch.compiler.reset()
                try:
                    result = cell(stranger, way, plain)
                except RarebitError as error:
                    result = {"refused": str(error)}
                except Exception as error:  # noqa: BLE001  # a finding
                    where = traceback.extract_tb(error.__traceback__)[-1]
                    text = str(error).strip().partition("\n")[0]
                    place = f"{Path(where.filename).name}:{where.lineno}"
                    result = {"error": f"{type(error).__name__} ({place}): {text}"}
                plain = result.get("moved", plain)
                line = {"model": stranger.name, "method": way, **result}
                print(json.dumps(line), file=real, flush=True)


# --- the command


def verdict(one: Mapping[str, Any]) -> str:
    """Return a cell in a word: ok, refused, or what failed."""
    if "refused" in one or "error" in one:
        return "refused" if "refused" in one else "error"
    if one.get("still") or one.get("moved") == []:
        return "still"
    apart = max(one.get(key, 0.0) for key in ("merge", "load", "difference"))
    return "ok" if apart <= LARGEST_DIFFERENCE else f"{apart:.0e}"


def kind_of(way: str) -> str:
    """Return the column of a method in the table."""
    if way in RULES:
        return "row rules"
    if way in technique_names():
        made = technique_class(way)
        if issubclass(made, SetsMethod):
            return "embedding sets"
        return (
            "methods around training" if issubclass(made, TrainingMethod) else "methods for tables"
        )
    return way


def table(cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of Markdown: for each model how many methods work, and the largest difference."""
    kinds = list(dict.fromkeys(kind_of(one["method"]) for one in cells))
    lines = [
        f"| model | {' | '.join(kinds)} | refused | failed | largest difference |",
        "|---" * (len(kinds) + 4) + "|",
    ]
    for model in dict.fromkeys(one["model"] for one in cells):
        own = [one for one in cells if one["model"] == model]
        words = [verdict(one) for one in own]
        works = []
        for kind in kinds:
            found = [verdict(one) == "ok" for one in own if kind_of(one["method"]) == kind]
            works.append(f"{sum(found)} of {len(found)}")
        apart = max(one.get(key, 0.0) for one in own for key in ("merge", "load", "difference"))
        failed = len(own) - words.count("ok") - words.count("refused")
        lines.append(
            f"| {model} | {' | '.join(works)} | {words.count('refused')} | {failed} | {apart:.0e} |"
        )
    return "\n".join(lines)


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment with some packages, made if it is not there."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {', '.join(requirements) or 'torch'} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)  # noqa: S603
        torch_version = version("torch").partition("+")[0]
        # torchvision has a torch of its own
        ours = [] if "torchvision" in requirements else [f"torch=={torch_version}"]
        packages = [*ours, "safetensors", "numpy", *requirements]
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)  # noqa: S603
    return python


def main() -> None:
    """Make the environments, run every cell in them, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--environments", type=Path, help="the folder of the environments")
    parser.add_argument("--only", default=",".join(LIBRARIES), help="libraries, joined by commas")
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    parser.add_argument(
        "--show", type=Path, help="print the table of a stored result, and nothing else"
    )
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library:
        run_library(options.library)
        return
    if options.show:
        print(table(json.loads(options.show.read_text())["cells"]))
        return
    if options.environments is None:
        parser.error("--environments names the folder that libraries are installed into")
    cells: list[dict[str, Any]] = []
    versions: dict[str, dict[str, str]] = {}
    inherited = os.environ | {
        "PYTHONPATH": str(Path(rb.__file__).parents[1]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in options.only.split(","):
        python = environment(options.environments / name, LIBRARIES[name][1])
        command = [str(python.absolute()), str(Path(__file__).resolve()), "--library", name]
        with tempfile.TemporaryDirectory() as place:  # libraries leave files where they run
            ended = subprocess.run(  # noqa: S603
                command, env=inherited, cwd=place, capture_output=True, text=True, check=False
            )
        if ended.returncode:
            sys.exit(f"{name} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
        first, *lines = map(json.loads, ended.stdout.splitlines())
        versions[name] = first["versions"]
        cells += lines
        for one in lines:
            if verdict(one) not in ("ok", "refused"):
                print(f"{one['model']}, {one['method']}: {one}", flush=True)
    print(table(cells))
    failed = [one for one in cells if verdict(one) not in ("ok", "refused")]
    print(f"{len(cells)} cells, {len(failed)} failed")
    if options.out:
        result = {"machine": machine(), "versions": versions, "failed": len(failed), "cells": cells}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
