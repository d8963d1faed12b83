"""Break the code in a copy, one break at a time, and report which breaks the tests do not notice.

    python tools/mutations.py                        all breaks
    python tools/mutations.py holm-order adam-eps    some
    python tools/mutations.py --list
    python tools/mutations.py --out benchmarks/results/mutations.json

A break replaces a text that occurs once in a file by another that is wrong, and names the tests that must fail
with it. The files of the last commit, with what has changed since, are copied to a temporary folder, where the
named tests must pass first; the tree itself is never changed. `tests/test_mutations.py` checks that every text
still occurs once and every named test exists, so the set cannot rot.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rarebit.machine import machine

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/rarebit"
NO_TESTS = (4, 5)
"""Exit codes of pytest without a test to run."""
PATIENCE = 600
"""Seconds that the tests of a break may take: a break may also make them wait forever."""


@dataclass(frozen=True)
class Break:
    """A break, and the tests that must notice it."""

    name: str
    file: str
    """Below `src/rarebit`."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Below `tests`: files, or tests in them."""

    def apply(self, root: Path) -> str:
        """Break the copy of the code below a root; return the text of the file before."""
        path = root / SOURCE / self.file
        text = path.read_text("utf-8")
        if text.count(self.old) != 1:
            sys.exit(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return text

    def restore(self, root: Path, text: str) -> None:
        """Write the file as it was."""
        (root / SOURCE / self.file).write_text(text, encoding="utf-8")


BREAKS = (
    # data
    Break(
        "variance-between-blocks",
        "data/raw/encode.py",
        "        self._squares += delta**2 * self.count * count / total\n",
        "",
        ("data/raw/test_encode.py::test_standardised_numbers_are_those_of_numpy",),
    ),
    Break(
        "bad-rows-lock",
        "data/raw/chunks.py",
        "        with self._lock:\n            self.reasons[reason] += 1",
        "        if True:\n            self.reasons[reason] += 1",
        ("data/raw/test_bad_rows.py::test_a_row_is_kept_that_comes_while_others_are_written",),
    ),
    Break(
        "unknown-row",
        "data/raw/coding.py",
        ".fill_null(UNKNOWN)",
        ".fill_null(MISSING)",
        ("data/raw/test_coding.py::test_values_of_every_type_are_the_same_texts",),
    ),
    Break(
        "rare-values-of-the-generator",
        "data/synthetic.py",
        "np.where(is_rare, UNKNOWN, np.arange(field.rows))",
        "np.where(is_rare, MISSING, np.arange(field.rows))",
        ("data/test_synthetic.py::test_a_seed_gives_these_bits_on_every_machine",),
    ),
    Break(
        "least-count",
        "data/raw/encode.py",
        "counts >= max(min_count, 1)",
        "counts > max(min_count, 1)",
        ("data/raw/test_encode.py::test_ids_counts_and_labels_are_those_of_plain_counting",),
    ),
    Break(
        "single-last-row",
        "data/order.py",
        "if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] == 1:",
        "if False:",
        ("data/test_dataset.py::test_batches_cover_every_row_once_in_order",),
    ),
    Break(
        "epoch-of-the-order",
        "data/order.py",
        "np.random.SeedSequence([seed, epoch])",
        "np.random.SeedSequence([seed, 0])",
        ("data/test_order.py::test_seed_and_epoch_decide_the_order",),
    ),
    # tables
    Break(
        "offsets-of-large-stacks",
        "tables/collection.py",
        "first_rows[self.field_of_slot].to(torch.int32 if small else torch.int64)",
        "first_rows[self.field_of_slot].to(torch.int32)",
        ("tables/test_collection.py::test_offsets_beyond_int32_are_int64",),
    ),
    Break(
        "offsets-of-stacks",
        "tables/collection.py",
        "gather(self.embedding, ids + self.offsets, self.gradient_memory)",
        "gather(self.embedding, ids, self.gradient_memory)",
        ("tables/test_collection.py::test_rows_worked_by_hand",),
    ),
    Break(
        "gradient-of-repeated-ids",
        "tables/collection.py",
        "gradient.scatter_add_(0, index, rows.reshape(index.shape))",
        "gradient.scatter_(0, index, rows.reshape(index.shape))",
        ("tables/test_gather.py::test_rows_and_gradients_are_those_of_torch_to_the_last_bit",),
    ),
    Break(
        "grow-state-of-new-rows",
        "tables/apply.py",
        "                    state[key][rows] = start\n",
        "                    pass\n",
        ("tables/test_grow.py::test_training_goes_on_as_if_the_table_had_always_been_so_large",),
    ),
    Break(
        "grow-state-of-old-rows",
        "tables/apply.py",
        "fresh = homes[id(parameter)] if exchange.grown else None",
        "fresh = None",
        ("tables/test_grow.py::test_training_goes_on_as_if_the_table_had_always_been_so_large",),
    ),
    Break(
        "grow-place-in-stack",
        "tables/apply.py",
        "rows = target[1].start, target[1].start +",
        "rows = target[1].start + 1, target[1].start + 1 +",
        (
            "tables/test_grow.py::test_old_ids_of_every_method_train_as_if_the_table_had_always_been_so_large",
        ),
    ),
    Break(
        "grow-prior-with-padding",
        "tables/grow.py",
        "(total - _row(table, padding)) / max(start - 1, 1)",
        "total / max(start, 1)",
        ("tables/test_grow.py::test_counts_that_are_all_zero_weigh_all_rows_alike",),
    ),
    Break(
        "grow-counts",
        "methods/_counts.py",
        "(rows,), 0 if self.is_known",
        "(rows,), 1 if self.is_known",
        ("tables/test_grow.py::test_a_new_row_of_a_shrunk_table_is_the_prior_until_it_is_seen",),
    ),
    Break(
        "grow-threshold",
        "pruning/pep.py",
        "longer = start + start.sign()",
        "longer = start + 0 * start.sign()",
        ("tables/test_grow.py::test_new_rows_behind_thresholds_learn",),
    ),
    Break(
        "grow-schema",
        "tables/grow.py",
        "        module.schema = schema\n",
        "        pass\n",
        ("tables/test_grow.py::test_a_grown_model_of_ours_is_saved_and_loaded",),
    ),
    Break(
        "abundance-of-squares",
        "tables/spectrum.py",
        "return float(_over_largest(values).sum())",
        "return float(_over_largest(values).square().sum())",
        ("tables/test_spectrum.py::test_abundance_is_that_of_torchs_singular_values",),
    ),
    # methods
    Break(
        "hashing-equation",
        "methods/hashing.py",
        "self.inner(ids % self.buckets)",
        "self.inner(ids // 2 % self.buckets)",
        ("methods/test_hashing.py::test_rows_equal_the_equation",),
    ),
    Break(
        "low-rank-stack",
        "methods/low_rank.py",
        "thin, self.right[self.field_of_slot])",
        "thin, self.right[self.field_of_slot * 0])",
        ("contract/test_methods.py::test_contract[low-rank-stack]",),
    ),
    Break(
        "mlet-merge-padding",
        "methods/mlet.py",
        "            weight[self.padding_idx] = 0.0\n",
        "            pass\n",
        ("methods/test_mlet.py::test_merged_equals_looked_up",),
    ),
    Break(
        "mlet-equation",
        "methods/mlet.py",
        "rows: Tensor = self.inner(ids) @ self.projection\n",
        "rows: Tensor = self.inner(ids) @ self.projection * 1.001\n",
        ("methods/test_mlet.py::test_rows_worked_by_hand",),
    ),
    Break(
        "shrinkage-weights",
        "methods/_counts.py",
        "return (n / (n + c)).to(",
        "return (n / (n + c + 1)).to(",
        ("methods/test_shrinkage.py::test_rows_are_those_of_the_equation",),
    ),
    Break(
        "shrinkage-gradient-of-the-prior",
        "methods/shrinkage.py",
        "spare = (1 - weights) * gradient",
        "spare = weights * gradient",
        ("methods/test_shrinkage.py::test_without_strength_it_is_the_plain_table_bit_by_bit",),
    ),
    Break(
        "forgetting-share",
        "methods/forgetting.py",
        "share = n / (n.double() + c)",
        "share = c / (n.double() + c)",
        ("methods/test_forgetting.py::test_each_row_keeps_its_share_row_by_row",),
    ),
    Break(
        "coding-without-counts",
        "methods/evidence_coding.py",
        "evidence = counts.double().numpy() + 0.5",
        "evidence = 0.0 * counts.double().numpy() + 0.5",
        ("methods/test_evidence_coding.py::test_counts_lower_the_error_that_lookups_feel",),
    ),
    Break(
        "price-of-a-bit",
        "methods/evidence_coding.py",
        "price * self.rows_in[:, None, None] * number",
        "price * number",
        ("methods/test_evidence_coding.py::test_bits_are_those_of_reverse_water_filling",),
    ),
    Break(
        "padding-of-counted-lookups",
        "methods/_counts.py",
        "                seen[site.table.padding_idx] = 0\n",
        "                pass\n",
        ("methods/test_count_lookups.py::test_lookups_worked_by_hand",),
    ),
    Break(
        "quantize-largest-code",
        "methods/quantize.py",
        "largest: int = 2 ** (bits - 1) - 1",
        "largest: int = 2 ** (bits - 1) - 2",
        ("methods/test_quantize.py::test_a_table_worked_by_hand",),
    ),
    Break(
        "mean-over-sets",
        "models/_base.py",
        "        return features.mean(dim=0)\n",
        "        return features.sum(dim=0)\n",
        (
            "methods/test_multi_embedding.py::test_scores_and_gradients_are_those_of_a_loop_over_single_sets",
        ),
    ),
    # interactions
    Break(
        "fm-squares",
        "interactions/basic.py",
        "0.5 * (square_of_sum - sum_of_squares)",
        "0.5 * square_of_sum",
        ("interactions/test_fm.py::test_a_value_worked_by_hand",),
    ),
    Break(
        "cross-residual",
        "interactions/cross.py",
        "first * affine(crossed, weight, bias) + crossed",
        "first * affine(crossed, weight, bias)",
        ("interactions/test_cross.py::test_a_value_worked_by_hand",),
    ),
    # pruning and packed tables
    Break(
        "gradient-of-cut-entries",
        "pruning/pep.py",
        "return gradient * (cut != 0), of_thresholds",
        "return gradient, of_thresholds",
        ("pruning/test_pep.py::test_the_gradients_of_equation_11_worked_by_hand",),
    ),
    Break(
        "gradient-of-thresholds",
        "pruning/pep.py",
        "(cut.sign() * gradient).neg_()",
        "(cut.sign() * gradient)",
        ("pruning/test_pep.py::test_the_gradients_of_equation_11_worked_by_hand",),
    ),
    Break(
        "mask-of-a-stack",
        "pruning/masked.py",
        "take_rows(self.kept, ids + self.offsets)",
        "take_rows(self.kept, ids + 0 * self.offsets)",
        ("contract/test_methods.py::test_contract[masked-stack]",),
    ),
    Break(
        "packed-int32-limit",
        "codes/packed.py",
        "torch.int32 if last <= torch.iinfo(torch.int32).max else torch.int64",
        "torch.int32",
        ("codes/test_packed_file.py::test_offsets_beyond_31_bits_take_64",),
    ),
    Break(
        "packed-rows-with-one-entry",
        "codes/packed.py",
        "filled = counts > 0",
        "filled = counts > 1",
        ("codes/test_packed.py",),
    ),
    Break(
        "coded-order-of-bits",
        "codes/coded.py",
        "(some[rows, direction] >> bit) & 1",
        "(some[rows, direction] >> (layout.bits[kind, direction] - 1 - bit)) & 1",
        ("codes/test_coded.py::test_a_row_worked_by_hand",),
    ),
    Break(
        "coded-first-row-of-a-run",
        "codes/coded.py",
        "torch.where(ids >= starts[place + step]",
        "torch.where(ids > starts[place + step]",
        ("codes/test_coded.py::test_rows_are_those_of_the_equation",),
    ),
    Break(
        "coded-bits-of-the-kernel",
        "codes/coded_kernel.cpp",
        "word >> lanes.half",
        "word >> (lanes.half + 1)",
        ("codes/test_coded.py::test_the_kernel_gives_the_bits_of_torch",),
    ),
    Break(
        "coded-classes-beyond",
        "codes/coded.py",
        "int(self.classes.max()) >= len(self.means)",
        "int(self.classes.max()) > len(self.means)",
        ("codes/test_coded.py::test_what_is_wrong_is_said_and_the_table_keeps_its_rows",),
    ),
    # row gradients and transfer
    Break(
        "rule-on-scaled-gradients",
        "row_gradients/seam.py",
        "unscaled = sums if scale is None else sums * scale.reciprocal()",
        "unscaled = sums",
        (
            "row_gradients/test_row_gradients_loop.py::test_a_rule_sees_unscaled_gradients_and_the_scaler_takes_the_answer",
        ),
    ),
    Break(
        "mask-of-the-transfer-gradient",
        "transfer/running.py",
        "            gradient = gradient * (batch.rows.detach() != 0)\n",
        "            pass\n",
        (
            "transfer/test_harmless_transfer.py::test_only_the_entries_that_are_left_of_a_masked_table_count",
        ),
    ),
    Break(
        "barrier-below-zero",
        "transfer/lexico.py",
        "((barrier - agreement) / square).clamp(min=0.0)",
        "((barrier - agreement) / square)",
        ("transfer/test_lexico.py::test_the_closed_form_solves_the_problem_of_each_row",),
    ),
    # training
    Break(
        "adam-eps",
        "training/optimizers.py",
        "(1.0 - beta2**step) ** 0.5 + eps",
        "(1.0 - beta2**step) ** 0.5 + 1e-8",
        ("training/test_rowwise.py::test_eps_is_torchs_and_where_torch_has_it",),
    ),
    Break(
        "adam-eps-of-the-kernel",
        "training/row_kernel.cpp",
        "(std::sqrt(v[i]) / correction2 + eps)",
        "(std::sqrt(v[i]) / correction2 + 1e-8f)",
        ("training/test_rowwise.py::test_eps_is_torchs_and_where_torch_has_it",),
    ),
    Break(
        "coupled-weight-decay",
        "training/optimizers.py",
        "return lambda row, gradient: (row, gradient + weight_decay * row)",
        "return lambda row, gradient: (row, gradient)",
        ("training/test_rowwise.py::test_both_forms_give_the_same",),
    ),
    Break(
        "decoupled-weight-decay",
        "training/optimizers.py",
        "(row * (1.0 - lr * weight_decay), gradient)",
        "(row * (1.0 - weight_decay), gradient)",
        (
            "training/test_rowwise.py::test_decoupled_weight_decay_shrinks_network_and_touched_rows_directly",
        ),
    ),
    Break(
        "auc-ties",
        "training/metrics.py",
        "positives * (2 * below + negatives)",
        "positives * 2 * below",
        ("training/test_metrics.py::test_auc_counts_pairs_exactly",),
    ),
    Break(
        "grouped-auc-groups",
        "training/metrics.py",
        "below = below - (totals[1].cumsum(0) - totals[1])[of_tie]",
        "below = below - totals[1][of_tie]",
        ("training/test_weights_and_groups.py::test_grouped_auc_is_the_mean_over_groups",),
    ),
    Break(
        "weights-in-loss",
        "training/step.py",
        "parts.append(batch.weight.to(logits.dtype))",
        "parts.append(torch.ones_like(logits))",
        ("training/test_weights_and_groups.py::test_weights_of_one_change_nothing_and_others_do",),
    ),
    Break(
        "plan-lookups",
        "sharding/plan.py",
        "least = min(room, key=lambda rank: (looked_up[rank], held[rank]))",
        "least = min(room, key=lambda rank: held[rank])",
        ("sharding/test_plan.py::test_a_large_table_leaves_its_process_a_share_of_the_lookups",),
    ),
    Break(
        "improve-tried",
        "study/improve.py",
        'is_over = 1 < done == len(plan["rounds"])',
        "is_over = False",
        (
            "study/test_improve.py::test_a_plan_becomes_what_fits_once_it_is_known_how_long_runs_take",
        ),
    ),
    Break(
        "rarest-fifth",
        "training/metrics.py",
        "fifth, frequent = order[:size], order[-size:]",
        "fifth, frequent = order[-size:], order[:size]",
        ("training/test_evaluate.py::test_the_rarest_fifth_and_the_deciles_are_the_naive_ones",),
    ),
    Break(
        "rarity-of-counts",
        "training/metrics.py",
        "seen = torch.log1p(counts[field.name]",
        "seen = (counts[field.name]",
        ("training/test_evaluate.py::test_rarity_is_the_sum_of_logs",),
    ),
    Break(
        "strict-early-stopping",
        "training/fit.py",
        "        if value > self.value:\n",
        "        if value >= self.value:\n",
        ("training/test_fit.py::test_auc_picks_the_highest_and_the_first_of_equals",),
    ),
    Break(
        "patience",
        "training/fit.py",
        "waited >= patience",
        "waited > patience",
        ("training/test_fit.py::test_the_best_epoch_is_kept_and_training_stops_after_patience",),
    ),
    Break(
        "random-state-of-a-resume",
        "training/fit.py",
        '        set_random_state(state["random"])\n',
        "",
        ("training/test_resume.py::test_a_run_stopped_in_any_step_goes_on_to_the_same_bits",),
    ),
    Break(
        "best-weights-of-a-run",
        "training/fit.py",
        "            self.model.load_state_dict(self.weights)\n        return self.epoch",
        "            pass\n        return self.epoch",
        ("training/test_fit.py::test_the_best_epoch_is_kept_and_training_stops_after_patience",),
    ),
    Break(
        "average-of-waiting-rows",
        "ema.py",
        "(count - step).double()",
        "(count - step).clamp(max=1).double()",
        ("test_ema.py::test_averages_are_those_of_the_definition",),
    ),
    Break(
        "averages-statistics",
        "ema.py",
        "norm.momentum = 1 / number  #",
        "norm.momentum = 0.1  #",
        (
            "test_ema.py::test_averages_have_statistics_of_their_own_and_the_weights_get_theirs_back",
        ),
    ),
    # storage
    Break(
        "file-sync-of-tensor-folders",
        "storage/files.py",
        "        disk.sync_file(partial)\n        checksum = file_checksum(partial)",
        "        checksum = file_checksum(partial)",
        (
            "storage/test_power_loss.py::test_after_a_power_loss_anywhere_nothing_is_lost_and_work_goes_on[save-None]",
        ),
    ),
    Break(
        "folder-sync-of-tensor-folders",
        "storage/files.py",
        "        disk.sync_folder(folder)\n        described =",
        "        described =",
        (
            "storage/test_power_loss.py::test_after_a_power_loss_anywhere_nothing_is_lost_and_work_goes_on[save-None]",
        ),
    ),
    Break(
        "checksum-of-files",
        "storage/files.py",
        "if file_checksum(place) != checksum:",
        "if False:",
        ("training/test_model_file.py::test_any_changed_byte_of_the_weights_is_noticed",),
    ),
    # studies
    Break(
        "results-before-scores",
        "study/runs.py",
        "        write_file(self.path / SCORES, file.getvalue(), error=StudyError)\n"
        "        write_json(self.path / RESULT, values, error=StudyError)\n",
        "        write_json(self.path / RESULT, values, error=StudyError)\n"
        "        write_file(self.path / SCORES, file.getvalue(), error=StudyError)\n",
        ("study/test_runs.py::test_a_run_whose_scores_cannot_be_written_has_no_result",),
    ),
    Break(
        "failed-trials-are-out",
        "study/study.py",
        'any(failure.kind == "diverged" for failure in failures)',
        "bool(failures)",
        ("study/test_tuning.py::test_only_a_trial_that_diverged_is_out",),
    ),
    Break(
        "pairing-of-seeds",
        "study/results.py",
        "[ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]",
        "[a - b for a, b in zip(ours.values(), theirs.values(), strict=False)]",
        ("study/test_results.py::test_figures_are_by_seed_whatever_the_order_of_runs",),
    ),
    Break(
        "test-rows-pick-trials",
        "study/study.py",
        "aucs = [record.valid_auc for run",
        "aucs = [record.auc for run",
        ("study/test_tuning.py::test_validation_picks_whatever_test_rows_say",),
    ),
    Break(
        "holm-order",
        "study/statistics.py",
        "own = min(self.level / (len(p) - rank), most)",
        "own = min(self.level / (1 + rank), most)",
        ("study/test_verdict.py::test_the_level_is_divided_as_holm_does",),
    ),
    Break(
        "pooled-spread",
        "study/statistics.py",
        "return [own] if pooled is None else [own, pooled]",
        "return [own]",
        (
            "study/test_verdict.py::test_the_pooled_spread_widens_the_interval_of_a_method_that_seems_to_agree_by_luck",
        ),
    ),
    Break(
        "delong-ties",
        "study/statistics.py",
        "below = 2 * (others.cumsum(0) - others) + others",
        "below = 2 * (others.cumsum(0) - others)",
        ("study/test_delong.py::test_it_equals_the_definition_pair_by_pair",),
    ),
    # serving
    Break(
        "float-with-an-exponent",
        "serving/columns.py",
        "    if abs(value) < SMALLEST_POSITIONAL:",
        "    if abs(value) < 1e-4:",
        ("serving/test_columns.py::test_a_float_is_spelled_as_polars_spells_it",),
    ),
    Break(
        "separator-in-a-value",
        "serving/columns.py",
        "    if column.separator and any(",
        "    if not column.name and any(",
        ("serving/test_requests.py::test_a_bad_request_is_refused_with_what_is_wrong",),
    ),
    Break(
        "batch-split",
        "serving/worker.py",
        "            begin, end = end, end + request.rows.num_rows",
        "            begin, end = 0, request.rows.num_rows",
        (
            "serving/test_lifecycle.py::test_a_full_queue_refuses_and_micro_batches_give_the_same_scores",
        ),
    ),
    Break(
        "requests-of-a-dead-worker",
        "serving/pool.py",
        "            self._suspect(pending)\n",
        "            pass\n",
        ("serving/test_lifecycle.py::test_requests_survive_the_death_of_a_worker",),
    ),
    Break(
        "suspects-together",
        "serving/pool.py",
        "            while self.suspects and not worker.unanswered:",
        "            while self.suspects:",
        ("serving/test_lifecycle.py::test_a_request_that_kills_workers_takes_no_other_with_it",),
    ),
    Break(
        "stop-at-once",
        "serving/server.py",
        "        server.force_exit = server.should_exit",
        "        server.force_exit = True",
        ("serving/test_lifecycle.py::test_a_stop_finishes_accepted_requests",),
    ),
    Break(
        "unchecked-version",
        "serving/scorer.py",
        "        if difference > TOLERANCE:",
        "        if difference > 1.0:",
        ("serving/test_lifecycle.py::test_a_version_that_fails_leaves_the_old_one",),
    ),
    Break(
        "no-copy-of-a-version",
        "serving/repository.py",
        "        return Snapshot(folder, path, version",
        "        return Snapshot(folder, source.path, version",
        ("serving/test_lifecycle.py::test_a_version_that_fails_leaves_the_old_one",),
    ),
    Break(
        "any-token",
        "serving/front.py",
        "            if not hmac.compare_digest(_token_of(found), token.encode()):",
        "            if not found:",
        ("serving/test_lifecycle.py::test_a_token",),
    ),
)


def main() -> None:
    """Try breaks, print what survives, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("names", nargs="*", help="breaks to try; all if none is given")
    parser.add_argument("--list", action="store_true", help="only print the names")
    parser.add_argument("--out", type=Path, help="where to write the report as JSON")
    options = parser.parse_args()
    unknown = set(options.names) - {one.name for one in BREAKS}
    if unknown:
        sys.exit(f"there is no break {', '.join(sorted(unknown))}; see --list")
    chosen = [one for one in BREAKS if not options.names or one.name in options.names]
    if options.list:
        print(*(f"{one.name}: {one.file}" for one in chosen), sep="\n")
        return
    facts, start = machine(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = copy_tree(Path(folder) / "copy")
        require_passing(root, sorted({test for one in chosen for test in one.tests}))
        noticed = {one.name: noticed_by(one, root) for one in chosen}
    survivors = [name for name, test in noticed.items() if test is None]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} breaks were noticed")
    if options.out is not None:
        report = {
            "command": "python tools/mutations.py",
            "machine": facts,
            "minutes": round((time.perf_counter() - start) / 60, 1),
            "breaks": len(chosen),
            "survivors": survivors,
            "noticed_by": noticed,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if survivors:
        sys.exit("survived: " + ", ".join(survivors))


def copy_tree(root: Path) -> Path:
    """Copy the files that git knows, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    return root


def require_passing(root: Path, tests: Sequence[str]) -> None:
    """End unless all tests pass without a break."""
    code, told = run_tests(root, tests, seconds=None)
    if code != 0:
        sys.exit(f"{told}\nthe tests must pass before anything is broken")


def noticed_by(one: Break, root: Path) -> str | None:
    """Return the test that fails with a break, or why tests end; None where all pass."""
    start, before = time.perf_counter(), one.apply(root)
    try:
        code, told = run_tests(root, one.tests)
    finally:
        one.restore(root, before)
    if code in NO_TESTS:
        sys.exit(f"{one.name}: pytest found no test in {', '.join(one.tests)}")
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?([^\s[]+)", told, re.MULTILINE)
    found = None if code == 0 else failed[1] if failed else told[-80:]
    word = "SURVIVED" if found is None else "noticed"
    print(f"{word} {one.name} ({time.perf_counter() - start:.0f} s) {found or ''}", flush=True)
    return found


def run_tests(
    root: Path, tests: Sequence[str], *, seconds: float | None = PATIENCE
) -> tuple[int, str]:
    """Run tests of the copy, quick ones, up to the first that fails; return pytest's exit code and output."""
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider"]
    try:
        found = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "the tests did not end"
    return found.returncode, found.stdout


if __name__ == "__main__":
    main()
