"""Pictures of plans: stages with what is known of them, and what crosses between them."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
import torch
from torch import fx

from fxpipe.errors import VerificationError
from fxpipe.extensions.draw.canvas import text_width
from fxpipe.extensions.draw.picture import FAULT, SKIP, Picture
from fxpipe.extensions.draw.plan import draw_plan
from fxpipe.extensions.tables import count_text, lines, runs, time_text
from fxpipe.formatting import bytes_text
from fxpipe.ir.called import Called
from fxpipe.ir.plan import Argument, Plan, Stage, StageCosts, ValueSpec
from fxpipe.ir.value import HOST, Edge
from tests.helpers.plans import both, chain, plan_of, skipping


def svg(picture: Picture) -> str:
    return picture.pipe("svg", encoding="utf-8")


def texts(picture: Picture) -> list[str]:
    """All texts of the picture."""
    found = re.findall(r"<text[^>]*>([^<]*)</text>", svg(picture))
    return [unescape(text).replace("\xa0", " ").replace("\u200b", "").strip() for text in found]


def arrow(picture: Picture, tail: str, head: str) -> str:
    """The SVG of the arrows between two nodes."""
    title = f"{tail}&#45;&gt;{head}"
    groups = re.findall(r'<g id="edge\d+".*?</g>', svg(picture), re.DOTALL)
    return "".join(group for group in groups if f"<title>{title}</title>" in group)


def stage_of(shapes: dict[str, tuple[int, ...] | None], **fields: object) -> Stage:
    """Stage 0 with parameters of these shapes, known or not, and two operations."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name, shape in shapes.items():
        node = graph.placeholder(name)
        if shape is not None:
            node.meta["val"] = torch.empty(shape, device="meta")
    y = graph.call_function(torch.relu, (x,))
    graph.output((graph.call_function(torch.neg, (y,)),))
    parameters = tuple(Argument(name, name) for name in shapes)
    stage = Stage(0, parameters, (), (), fx.GraphModule(torch.nn.Module(), graph))
    return replace(stage, **fields)  # type: ignore[arg-type]


def test_stages_and_values_of_a_chain_are_all_there() -> None:
    shown = texts(draw_plan(chain(3)))
    assert {"stage 0", "stage 1", "stage 2", "x", "y0", "y1", "loss"} <= set(shown)
    assert shown.count("input") == shown.count("output") == 1


def test_stages_side_by_side_are_drawn_beside_each_other() -> None:
    edges = [Edge(source, target, f"y{source}") for source, target in ((0, 1), (1, 3), (2, 3))]
    drawn = svg(draw_plan(plan_of(4, *edges)))
    heights = {stage: y for y, stage in re.findall(r' y="([^"]*)"[^>]*>stage (\d)</text>', drawn)}
    assert heights["1"] == heights["2"]
    assert float(heights["0"]) < float(heights["1"]) < float(heights["3"])


def test_skips_are_dashed_and_say_that_they_are_stashed_and_popped() -> None:
    picture = draw_plan(skipping(4))
    skip = arrow(picture, "stage0", "stage3")
    assert "stash and pop" in skip
    assert skip.count("stroke-dasharray") == 2  # h has a gradient and size has none
    assert SKIP.lower() in skip
    assert "stroke-dasharray" not in arrow(picture, "stage0", "stage1")


def test_values_that_go_the_same_way_share_an_arrow() -> None:
    picture = draw_plan(plan_of(2, Edge(0, 1, "a"), Edge(0, 1, "b"), *both(0, 1, "c")))
    drawn = arrow(picture, "stage0", "stage1")
    assert drawn.count("<path") == 2
    assert drawn.count("<ellipse") == 1  # the ring of the gradient
    assert "ring: a gradient comes back" in texts(picture)


def test_many_values_are_counted() -> None:
    edges = [Edge(0, 1, f"v{n}") for n in range(20)]
    specs = {edge.value: ValueSpec((256,), torch.float32) for edge in edges}
    shown = texts(draw_plan(replace(plan_of(2, *edges), specs=specs)))
    assert "… and 14 more, 14.0 KiB" in shown
    assert "v5 · 256 float32 · 1.0 KiB" in shown
    assert not any(text.startswith("v6") for text in shown)
    unknown = texts(draw_plan(plan_of(2, *edges)))
    assert "… and 14 more" in unknown


def test_shapes_and_bytes_are_shown_where_known() -> None:
    specs = {"y0": ValueSpec((8, 64, 32, 32), torch.float32), "x": ValueSpec((), torch.int64)}
    shown = texts(draw_plan(replace(chain(2), specs=specs)))
    assert {"y0 · 8×64×32×32 float32 · 2.0 MiB", "x · scalar int64 · 8 B"} <= set(shown)


def test_a_stage_tells_its_modules_costs_parameters_and_operations() -> None:
    stage = stage_of(
        {"w": (1000, 20), "b": (20,)},
        modules=("encoder", "blocks.0", "blocks.1", "blocks.2"),
        costs=StageCosts(0.0032, 0.1234),
    )
    shown = texts(draw_plan(Plan((stage,), ())))
    assert "encoder, blocks.0–2" in shown
    assert "forward 3.2 ms · backward 123 ms" in shown
    assert "2 parameters (20.0 k elements)" in shown
    assert "2 operations" in shown


def test_how_well_the_stages_are_balanced_is_told() -> None:
    plan = chain(2)
    costs = StageCosts(1e-3, 2e-3), StageCosts(2e-3, 4e-3)
    stages = tuple(replace(s, costs=c) for s, c in zip(plan.stages, costs, strict=True))
    shown = texts(draw_plan(replace(plan, stages=stages)))
    assert {"33 % of the work", "67 % of the work"} <= set(shown)
    assert any("slowest stage: 1.33 times the mean" in text for text in shown)
    assert not any("% of the work" in text for text in texts(draw_plan(plan)))


def test_elements_are_not_guessed() -> None:
    shown = texts(draw_plan(Plan((stage_of({"w": (3,), "b": None}),), ())))
    assert "2 parameters" in shown


def test_leaf_modules_and_buffers_are_told() -> None:
    stage = stage_of({}, buffers=(Argument("mean", "norm.mean"),))
    graph = stage.graph.graph
    with graph.inserting_before(graph.output_node()):
        graph.create_node("call_function", Called(), name="part")
    shown = texts(draw_plan(Plan((stage,), ())))
    assert "0 parameters · 1 buffer" in shown
    assert "3 operations · leaf modules" in shown


@pytest.mark.parametrize(
    "name", [r"a\Nb\n", "<b>", 'quo"te', "amp&lt;", "{x|y}", "col:on", "ümlaut", "</TD>"]
)
def test_odd_names_are_shown_as_they_are(name: str) -> None:
    stage = stage_of({}, modules=(name,))
    plan = Plan((stage,), (Edge(HOST, 0, name), Edge(0, HOST, name + "2")))
    shown = texts(draw_plan(plan))
    assert shown.count(name) == 2
    assert name + "2" in shown


def test_an_input_of_several_stages_is_drawn_once() -> None:
    picture = draw_plan(plan_of(2, Edge(HOST, 0, "x"), Edge(HOST, 1, "x")))
    assert texts(picture).count("input") == 1
    assert arrow(picture, "input0", "stage0")
    assert arrow(picture, "input0", "stage1")


@pytest.mark.parametrize(
    "plan",
    [
        Plan((), ()),
        plan_of(2),
        plan_of(2, Edge(1, 0, "backwards")),
        plan_of(1, Edge(0, 5, "nowhere")),
        plan_of(1, Edge(HOST, HOST, "through")),
    ],
)
def test_any_plan_can_be_drawn(plan: Plan) -> None:
    assert svg(draw_plan(plan))


def test_a_long_list_of_modules_is_elided() -> None:
    names = tuple(f"part{n}.{'inner' * 12}.layer" for n in range(30))
    shown = texts(draw_plan(Plan((stage_of({}, modules=names),), ())))
    assert "… and 26 more" in shown
    assert max(len(text) for text in shown if "stage 0: " not in text) <= 60  # faults are whole


def test_runs_of_numbered_names_are_drawn_together() -> None:
    assert runs(["a.0", "a.1", "a.2", "b.3", "a.5", "c"]) == ["a.0–2", "b.3", "a.5", "c"]
    assert runs(["0", "1", "2x"]) == ["0–1", "2x"]
    assert runs([]) == []


def test_lines_are_filled_and_cut() -> None:
    assert lines(["aa", "bb", "cc"], 6, 2) == ["aa, bb,", "cc"]
    assert lines(["aa", "bb", "cc", "dd", "ee"], 6, 1) == ["aa, bb,", "… and 3 more"]
    assert lines(["0123456789"], 6, 2) == ["…56789"]
    assert lines([], 6, 2) == [""]


def test_quantities_are_short() -> None:
    sizes = (0, 1023, 1024, 1024**2 - 1, 5 * 1024**3, 1024**5)
    assert [bytes_text(n) for n in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]
    assert [count_text(n) for n in (9999, 12_345, 999_999, 1_200_000, 7 * 10**9)] == [
        "9999",
        "12.3 k",
        "1.0 M",
        "1.2 M",
        "7.0 G",
    ]
    assert [time_text(t) for t in (0.0001234, 0.0123, 1.5)] == ["0.123 ms", "12.3 ms", "1500 ms"]


def test_stages_and_edges_at_fault_are_red_and_the_faults_listed() -> None:
    plan = plan_of(3, Edge(0, 1, "a"), Edge(2, 1, "back"))
    with pytest.raises(VerificationError) as caught:
        plan.verify()
    drawn = svg(plan.draw())
    shown = texts(plan.draw())
    assert all(str(fault) in " ".join(shown) for fault in caught.value.faults)
    for number, fault in enumerate(caught.value.faults, start=1):
        assert f"{number}. {fault}" in shown
    assert any(fault.subject == "edge skip back 2->1" for fault in caught.value.faults)
    strokes = re.findall(r'<path fill="none" stroke="([^"]+)"', drawn)
    assert sorted(stroke == FAULT.lower() for stroke in strokes) == [False, True]


def test_a_fault_of_a_node_marks_its_stage() -> None:
    def stage(index: int, reads: str, makes: str, method: str) -> Stage:
        graph = fx.Graph()
        read = graph.placeholder(reads)
        graph.output((graph.create_node("call_method", method, (read,), name=makes),))
        return Stage(index, (), (), (), fx.GraphModule(torch.nn.Module(), graph))

    edges = Edge(HOST, 0, "x"), Edge(0, 1, "a"), Edge(1, HOST, "b")
    plan = Plan((stage(0, "x", "a", "relu"), stage(1, "a", "b", "relu_")), edges)
    with pytest.raises(VerificationError, match="1 fault:\n  stage 1, node b: relu_ writes"):
        plan.verify()
    first, second = draw_plan(plan).body[:2]
    assert FAULT not in first
    assert FAULT in second


def test_text_stays_in_its_box_in_a_font_as_wide_as_dejavu_sans() -> None:
    drawn = draw_plan(skipping(4)).pipe("svg", encoding="utf-8")
    right = float(re.findall(r'viewBox="0.00 0.00 ([0-9.]+)', drawn)[0])
    shift = float(re.findall(r"translate\(([0-9.]+)", drawn)[0])
    for node in re.findall(r'<g id="node.*?</g>', drawn, re.DOTALL):
        shape = re.findall(r'(?:points| d)="([^"]*)"', node)[0]
        edge = max(float(x) for x in re.findall(r"(-?[0-9.]+),-?[0-9.]+", shape))
        lines = re.findall(r'x="([^"]*)"[^>]*>([^<]*)</text>', node)
        assert lines
        for x, text in lines:
            assert float(x) + text_width(unescape(text), 10) <= edge, text
    caption = re.findall(
        r'<text[^>]* x="([^"]*)"[^>]*>([^<]*(?:parameter|dashed)[^<]*)</text>', drawn
    )
    assert any("dashed" in text for _, text in caption)
    for x, text in caption:
        assert shift + float(x) + text_width(unescape(text), 10) <= right
