"""Which cases of long tests `make test` takes; `make test-slow` takes the others.

A test with many cases, most of which differ in what other tests vary too, has some of them here:
first those that have the most values of parameters which no other has. A test with none has a quick
relative beside it.
"""

from collections import defaultdict
from typing import Any
from zlib import crc32

import pytest

__all__ = ["CASES", "mark_slow", "spread"]

# Number of cases that `make test` takes, by file and test.
CASES = {
    "contracts/test_attacks.py": {
        "test_states_of_other_shapes_types_and_values": 0,
    },
    "contracts/test_casts.py": {
        "test_between_backward_and_step_too": 1,
        "test_gradients_may_stay_wider_than_their_weights": 1,
        "test_it_goes_on_as_the_equations_do": 2,
        "test_to_other_types_and_back": 4,
    },
    "contracts/test_devices.py": {
        "test_each_goes_as_it_would_alone": 7,
    },
    "contracts/test_groups.py": {
        "test_every_option_is_a_groups_own": 7,
        "test_more_elements_than_32_bits_count": 7,
    },
    "contracts/test_guards.py": {
        "test_finite_gradients_of_any_size_leave_all_finite": 49,
    },
    "contracts/test_modes.py": {
        "test_a_tensor_learning_rate_is_the_same": 28,
        "test_foreach_equals_one_parameter_at_a_time": 14,
        "test_fused_equals_foreach_but_for_rounding": 14,
        "test_no_mode_needs_more_than_two_temporaries": 8,
        "test_no_mode_waits_for_the_device": 14,
    },
    "contracts/test_resume.py": {
        "test_resumes_to_the_bit_from_a_file": 28,
        "test_the_first_pass_is_the_same_after_a_pause": 7,
    },
    "contracts/test_steps.py": {
        "test_a_gradient_that_is_not_finite_changes_nothing": 28,
        "test_goes_in_the_right_direction": 14,
    },
    "contracts/test_torch_states.py": {
        "test_every_option_may_be_missing_in_an_older_state_dict": 7,
    },
    "contracts/test_torch_steps.py": {
        "test_a_scaler_with_autocast_and_a_schedule": 14,
        "test_all_modes_agree_with_every_set_of_options": 24,
        "test_groups_with_rates_of_their_own_and_empty_ones": 14,
        "test_schedules_go_the_right_way_with_a_rate_in_a_tensor_too": 14,
    },
    "contracts/test_types.py": {
        "test_a_cast_model_steps_as_one_whose_state_was_looked_at": 14,
        "test_a_model_may_be_cast_after_its_optimizer_was_made": 14,
        "test_fp16_without_a_master_takes_every_finite_gradient": 6,
        "test_without_a_master_a_step_is_that_in_float32_rounded_once": 12,
    },
    "golden/test_optim_golden.py": {
        "test_scaled_adam": 10,
    },
    "integrations/test_extras.py": {
        "test_a_broken_trainer_fails_where_all_are_installed": 0,
        "test_a_missing_package_is_named": 0,
    },
    "unit/benchmarks/test_compiled.py": {
        "test_every_trial_gives_the_losses_of_torch": 0,
    },
    "unit/benchmarks/test_truth.py": {
        "test_replicas_find_adams_critical_batch_within_their_error": 0,
        "test_training_the_task_has_the_expected_loss": 1,
    },
    "unit/cli/test_compare.py": {
        "test_it_prints_verdicts_and_goes_on": 0,
    },
    "unit/cli/test_damage.py": {
        "test_a_damaged_run": 3,
    },
    "unit/cli/test_faults.py": {
        "test_a_file_in_place_of_the_checkpoints": 0,
        "test_a_page_that_cannot_be_written_costs_no_result": 1,
    },
    "unit/noise/test_intervals.py": {
        "test_hopeless_data_are_mostly_unbounded_and_still_covered": 0,
        "test_level_is_the_coverage": 0,
    },
    "unit/noise/test_summed_parts.py": {
        "test_a_sum_with_its_roundings_is_no_alteration": 9,
    },
    "unit/optim/test_loop_processes.py": {
        "test_a_lack_of_memory_in_the_compiler_is_passed_on": 0,
        "test_several_python_threads_step_at_once": 1,
        "test_without_any_folder_it_is_compiled_for_the_process": 1,
    },
    "unit/noise/test_noise_scale_history.py": {
        "test_finds_a_known_noise_scale": 1,
    },
    "unit/noise/test_split_batch.py": {
        "test_finds_a_known_noise_scale_with_odd_batches": 1,
    },
    "unit/noise/test_split_batch_interval.py": {
        "test_without_a_signal_nothing_is_resolved": 0,
    },
    "unit/optim/test_bad_inputs.py": {
        "test_data_exchanged_for_another_type": 9,
    },
    "unit/optim/test_checkpoint.py": {
        "test_a_refused_state_leaves_everything_as_it_was": 14,
    },
    "unit/optim/test_fused_memory.py": {
        "test_memory_of_states_in_another_type_or_order": 36,
    },
    "unit/optim/test_lamb.py": {
        "test_equals_the_reference": 11,
    },
    "unit/optim/test_lans.py": {
        "test_equals_the_reference": 10,
    },
    "unit/optim/test_scaled_adam.py": {
        "test_equals_the_reference": 8,
    },
    "unit/report/test_browser.py": {
        "test_partial_page": 1,
    },
    "unit/studies/compare/test_findings.py": {
        "test_no_finding_contradicts_another": 10,
        "test_twins_are_told_apart_in_one_study_of_twenty_at_most": 0,
    },
    "unit/studies/compare/test_page.py": {
        "test_a_partial_record_is_drawn": 7,
        "test_hostile_names_run_nothing_and_do_not_widen_the_page": 0,
    },
    "unit/studies/compare/test_run.py": {
        "test_a_plan_of_its_own_for_a_real_budget": 0,
        "test_a_task_with_an_evaluation_of_its_own": 0,
        "test_losses_fall_and_adamw_learns": 0,
        "test_other_types": 0,
    },
    "unit/studies/compare/test_statistics.py": {
        "test_the_promised_number_of_seeds_finds_the_difference": 1,
    },
    "unit/studies/compare/test_trials.py": {
        "test_decisions_are_the_same_whatever_else_is_recorded": 12,
    },
    "unit/studies/inspect/test_forward.py": {
        "test_accumulation": 1,
    },
    "unit/studies/inspect/test_page.py": {
        "test_on_a_phone_and_on_a_desk": 1,
    },
    "unit/studies/inspect/test_resume.py": {
        "test_a_lost_checkpoint_is_trained_again": 1,
        "test_only_checkpoints_that_may_be_needed_are_kept": 1,
    },
    "unit/studies/inspect/test_run.py": {
        "test_a_budget_that_is_over_too_early": 0,
        "test_a_hundred_steps": 0,
        "test_an_overflow_is_attributed_to_its_layer": 1,
        "test_nothing_is_at_fault_in_the_language_model": 0,
        "test_who_overflows_because_it_is_large_is_not_broken": 0,
    },
    "unit/studies/test_header.py": {
        "test_a_task_without_betas_and_weight_decay": 0,
        "test_ranks_keep_the_threads_that_their_launcher_gave_them": 0,
        "test_the_header_says_what_was_run": 0,
    },
    "unit/studies/test_resume.py": {
        "test_a_checkpoint_that_cannot_be_trusted_is_trained_anew": 1,
        "test_another_run_of_the_same_seed_has_the_same_record": 0,
        "test_numpy_in_a_task_does_not_change_a_resumed_run": 0,
        "test_stopped_and_resumed_to_the_same_numbers": 1,
    },
    "unit/studies/test_trainer.py": {
        "test_a_study_that_runs_out_of_memory_ends_with_an_answer": 0,
    },
    "unit/tasks/test_built_in.py": {
        "test_it_trains": 1,
    },
    "unit/tasks/test_corpus.py": {
        "test_the_standard_library_reads_the_same_in_another_process": 0,
    },
    "unit/test_tool_pairs.py": {
        "test_a_pair_of_tools_does_what_it_does_without_loss_scales": 10,
    },
}


def mark_slow(items: list[pytest.Item]) -> None:
    """Marks all cases but those that ``make test`` takes; of a part, if a part is collected."""
    found = defaultdict(list)
    for item in items:
        count = _cases_of(item)
        if count is not None and item.get_closest_marker("slow") is None:
            found[item.nodeid.partition("[")[0], count].append(item)
    for (_, count), cases in found.items():
        kept = spread(cases, count)
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def spread(cases: list[Any], count: int) -> list[Any]:
    """Cases with as many values of parameters as so few can have; alike in all processes."""
    left, kept, seen = sorted(cases, key=lambda item: crc32(item.nodeid.encode())), [], set()
    for _ in range(min(count, len(cases))):
        best = max(left, key=lambda item: len(_values(item) - seen))
        left.remove(best)
        kept.append(best)
        seen |= _values(best)
    return kept


def _values(item: Any) -> set[tuple[str, str]]:
    callspec = getattr(item, "callspec", None)
    return {(name, repr(value)) for name, value in callspec.params.items()} if callspec else set()


def _cases_of(item: pytest.Item) -> int | None:
    file, _, name = item.nodeid.removeprefix("tests/").partition("::")
    return CASES.get(file, {}).get(name.partition("[")[0])
