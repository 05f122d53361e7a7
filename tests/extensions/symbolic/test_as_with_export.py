"""What the core's tests show of models that torch.export traces holds with torch.fx, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import pytest
from torch import Tensor, nn

from fxpipe.extensions.symbolic.trace import trace_symbolically
from fxpipe.ir.traced import Traced
from tests.compiler import test_bad_functions, test_recompute
from tests.extensions.leaf_modules import (
    test_leaf_modules,
    test_objects,
    test_unasked_leaves,
    test_what_leaves_do,
)
from tests.extensions.loss_weight import test_loss_divisors
from tests.models import test_autocast, test_determinism, test_peers
from tests.passes.differentiate import test_lost_gradients
from tests.passes.graph import test_relay
from tests.passes.tracing import (
    test_foreign_errors,
    test_hidden_writes,
    test_losses,
    test_own_backward,
    test_state_reads,
    test_untraceable,
)
from tests.runtime import test_calls_in_part, test_clipping, test_sparse

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")  # CSR is in beta

EXTENSIONS = ["symbolic"]

AS_THEY_ARE: list[Callable[..., None]] = [
    test_autocast.test_what_autocast_is_around_runs_under_it_and_backward_does_not,
    test_bad_functions.test_a_call_that_has_no_gradient_names_its_line,
    test_bad_functions.test_a_matrix_for_a_loss_is_refused_by_its_shape,
    test_bad_functions.test_a_model_that_fails_only_where_gradients_are_wanted_names_its_line,
    test_clipping.test_norms_are_added_in_the_order_of_the_models_parameters,
    test_determinism.test_a_dropout_inside_of_a_leaf_module_may_begin_after_the_trace,
    test_determinism.test_dropout_drops_at_its_rate_and_each_place_and_microbatch_drops_others,
    test_determinism.test_modules_that_are_called_as_they_are_draw_the_same_too,
    test_foreign_errors.test_a_name_of_torch_fx_is_refused_and_the_advised_one_works,
    test_hidden_writes.test_sparse_gradients_are_refused_by_name,
    test_leaf_modules.test_a_leaf_sees_gradients_enabled_where_there_will_be_a_backward,
    test_leaf_modules.test_a_tensor_that_is_no_buffer_is_read,
    test_leaf_modules.test_hooks_of_leaves_run_in_every_step,
    test_leaf_modules.test_leaves_of_ones_own_branch_on_values,
    test_loss_divisors.test_a_mean_over_what_a_mask_selects_is_weighted_or_asked_for,
    test_loss_divisors.test_nothing_is_said_of_means_over_samples,
    test_loss_divisors.test_what_divides_a_loss_weighs_its_micro_batches,
    test_loss_divisors.test_what_is_not_told_from_a_loss_is_asked_for_once_with_the_line_to_paste,
    test_losses.test_losses_are_averaged_or_added_up,
    test_lost_gradients.test_a_hook_on_a_parameter_is_refused_and_works_again_once_removed,
    test_lost_gradients.test_a_loss_that_adds_the_models_weights_is_refused,
    test_lost_gradients.test_a_tensor_that_is_no_parameter_and_needs_a_gradient_is_refused,
    test_objects.test_a_leaf_is_given_an_object_of_its_class,
    test_own_backward.test_a_model_with_a_function_of_its_own_is_given_up_with_its_pipe,
    test_peers.test_skips_may_be_integers_booleans_and_detached,
    test_recompute.test_a_leaf_knows_that_it_runs_again_and_draws_the_same_mask,
    test_sparse.test_a_leaf_takes_a_sparse_input,
    test_sparse.test_a_sparse_buffer_is_read_by_every_stage,
    test_state_reads.test_what_is_made_of_a_tensor_follows_the_tensor,
    test_untraceable.test_a_refusal_shows_the_line_the_construct_and_the_way_out,
    test_untraceable.test_a_sparse_input_is_whole_in_every_microbatch,
    test_untraceable.test_the_way_out_leads_out,
    test_untraceable.test_two_traces_that_differ_are_told_with_the_line_where_they_part,
    test_what_leaves_do.test_a_model_with_leaves_may_be_called_in_inference_mode_first,
    test_what_leaves_do.test_a_quantised_tensor_stays_inside_of_a_leaf,
    test_what_leaves_do.test_what_a_leaf_sets_in_every_call_is_read_by_no_code_outside_of_it,
]

for _test in AS_THEY_ARE:
    globals()[_test.__name__] = update_wrapper(partial(_test, extensions=EXTENSIONS), _test)


@pytest.mark.parametrize("write", [test_hidden_writes.scaled, test_hidden_writes.rectified])
def test_what_a_model_writes_into_its_input_is_seen_by_itself_alone(
    write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    test_hidden_writes.test_what_a_model_writes_into_its_input_is_seen_by_itself_alone(
        write, "1f1b", caplog, EXTENSIONS
    )


@pytest.mark.parametrize(("between", "message"), test_lost_gradients.ON_VALUES[1:])
def test_a_hook_on_a_value_is_refused_with_its_line(between: Any, message: str) -> None:
    test_lost_gradients.test_a_hook_on_a_value_is_refused_with_its_line(
        between, message, EXTENSIONS
    )


@pytest.mark.parametrize(("inner", "leaves"), test_lost_gradients.LEAVES[:2])
def test_a_leaf_that_needs_gradients_in_forward_trains(inner: Any, leaves: Any) -> None:
    test_lost_gradients.test_a_leaf_that_needs_gradients_in_forward_trains_and_is_refused_without_them(
        inner, leaves, EXTENSIONS
    )


@pytest.mark.parametrize(
    "case", [test_own_backward.reverse, test_own_backward.sized, test_own_backward.nested]
)
def test_autograd_functions_are_called_as_they_are(case: Any) -> None:
    test_own_backward.assert_the_loops(test_own_backward.Model(case), EXTENSIONS)


@pytest.mark.parametrize(
    ("inner", "leaf"),
    [
        (lambda: test_unasked_leaves.Does(test_unasked_leaves.as_array), "inner"),
        (lambda: test_unasked_leaves.Does(test_unasked_leaves.chooses), "inner"),
        (
            lambda: test_unasked_leaves.Does(
                test_unasked_leaves.asks_a_part,
                test_unasked_leaves.Does(test_unasked_leaves.branches),
            ),
            "inner",
        ),
        (
            lambda: nn.Sequential(
                nn.Sequential(test_unasked_leaves.Does(test_unasked_leaves.branches), nn.Tanh())
            ),
            "inner.0.0",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.cond's own
def test_the_smallest_submodule_that_can_be_called_is_and_a_warning_says_so(
    inner: Callable[[], nn.Module], leaf: str, caplog: pytest.LogCaptureFixture
) -> None:
    test_unasked_leaves.test_the_smallest_submodule_that_can_be_called_is_and_a_warning_says_so(
        inner, leaf, caplog, EXTENSIONS
    )


@pytest.mark.parametrize("used", [["first"], ["early"], ["first", "third"]])
def test_what_only_unused_outputs_read_gets_no_gradient(used: list[str]) -> None:
    test_calls_in_part.test_what_only_unused_outputs_read_gets_no_gradient([], used, EXTENSIONS)


@pytest.mark.parametrize("seed", range(4))
def test_readers_of_a_value_stand_in_stages_in_the_order_of_the_program(seed: int) -> None:
    def trace(model: nn.Module, x: Tensor) -> Traced:
        return trace_symbolically(model, (x,), {})

    test_relay.test_readers_of_a_value_stand_in_stages_in_the_order_of_the_program(seed, trace)


def test_what_a_model_reads_of_python_state_is_watched_with_the_extension_that_does_so() -> None:
    values = pytest.importorskip("tests.extensions.python_state.test_guards_values")
    for case in values.CASES:
        values.test_a_plain_number_that_a_graph_holds_counts_from_the_next_step_on(case, EXTENSIONS)
