"""The methods that extensions give to classes of the core: where they are, and, for type checkers,
their arguments and what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpipe.extend import View

if TYPE_CHECKING:
    from fxpipe.extensions.checkpoint.pipe import checkpoint, load, restore, save
    from fxpipe.extensions.draw.grid import schedule_grid
    from fxpipe.extensions.draw.plan import draw_plan
    from fxpipe.extensions.draw.program import draw_program
    from fxpipe.extensions.draw.schedule import draw_schedule, draw_simulations
    from fxpipe.extensions.formulas.formulas import formulas
    from fxpipe.extensions.hub.pipe import load_hub, save_hub
    from fxpipe.extensions.initial_values.initial import reset_parameters
    from fxpipe.extensions.overlapping.delays import schedule_versions
    from fxpipe.extensions.simulator.kept import schedule_kept as count_kept
    from fxpipe.extensions.simulator.pipe import profile_pipe, simulate_pipe
    from fxpipe.extensions.simulator.simulate import simulate, simulate_schedule

pipeline_checkpoint = View("Pipeline.checkpoint", "checkpoint.pipe:checkpoint", lambda: checkpoint)
"""``pipe.checkpoint("run.pt")`` writes to a file all that training needs to go on."""

pipeline_load = View("Pipeline.load", "checkpoint.pipe:load", lambda: load)
"""``pipe.load("run")`` goes on from a folder."""

pipeline_load_hub = View("Pipeline.load_hub", "hub.pipe:load_hub", lambda: load_hub)
"""``pipe.load_hub("folder")`` loads weights as the hub of Hugging Face has them."""

pipeline_save_hub = View("Pipeline.save_hub", "hub.pipe:save_hub", lambda: save_hub)
"""``pipe.save_hub("folder")`` writes weights that ``from_pretrained`` reads."""

pipeline_profile = View("Pipeline.profile", "simulator.pipe:profile_pipe", lambda: profile_pipe)
"""``pipe.profile(x, target=y, steps=1)`` trains as ``step`` does, and returns the measured
times."""

pipeline_reset_parameters = View(
    "Pipeline.reset_parameters", "initial_values.initial:reset_parameters", lambda: reset_parameters
)
"""``pipe.reset_parameters(function)`` gives parameters and buffers their initial values."""

pipeline_restore = View("Pipeline.restore", "checkpoint.pipe:restore", lambda: restore)
"""``pipe.restore("run.pt")`` goes on from a file."""

pipeline_save = View("Pipeline.save", "checkpoint.pipe:save", lambda: save)
"""``pipe.save("run")`` writes the same to a folder, from any number of ranks."""

pipeline_simulate = View("Pipeline.simulate", "simulator.pipe:simulate_pipe", lambda: simulate_pipe)
"""``pipe.simulate()`` predicts the time and the memory of a step."""

plan_draw = View("Plan.draw", "draw.plan:draw_plan", lambda: draw_plan)
"""``plan.draw()`` is a picture of the stages and of what they exchange."""

program_draw = View("Program.draw", "draw.program:draw_program", lambda: draw_program)
"""``program.draw()`` is a picture of the instructions of each device."""

program_simulate = View("Program.simulate", "simulator:simulate", lambda: simulate)
"""``program.simulate()`` predicts when each instruction runs."""

recipe_formulas = View("Recipe.formulas", "formulas.formulas:formulas", lambda: formulas)
"""``recipe.formulas()`` are the closed forms of its figures."""

schedule_draw = View("Schedule.draw", "draw.schedule:draw_schedule", lambda: draw_schedule)
"""``schedule.draw()`` is a picture of when each task runs."""

schedule_grid_of = View("Schedule.grid", "draw.grid:schedule_grid", lambda: schedule_grid)
"""``schedule.grid()`` is the same as text."""

schedule_kept = View("Schedule.kept", "simulator.kept:schedule_kept", lambda: count_kept)
"""``schedule.kept()`` counts the micro-batches that wait for their backwards."""

schedule_simulate = View(
    "Schedule.simulate", "simulator:simulate_schedule", lambda: simulate_schedule
)
"""``schedule.simulate()`` predicts when each task runs."""

schedule_versions_of = View(
    "Schedule.versions", "overlapping.delays:schedule_versions", lambda: schedule_versions
)
"""``schedule.versions()`` tells the version of the weights that each task reads."""

simulation_draw = View(
    "Simulation.draw", "draw.schedule:draw_simulations", lambda: draw_simulations
)
"""``simulation.draw()`` is a picture of it; ``a.draw(b)`` shows two at one scale."""
