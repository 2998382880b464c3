"""`python -m finetune COMMAND`: everything but training."""

import argparse
import os
import sys

from finetune.launch import examine_launch
from finetune.machine import Machine, describe_machine, this_machine
from finetune.mistakes import Mistakes, exit_with, file_errors_are_mistakes
from finetune.preflight import find_launch_mistakes, find_mistakes, find_notes, precision
from finetune.quiet import silence
from finetune.recipe import load_recipe


def check(arguments: argparse.Namespace) -> None:
    """Say everything that is wrong with a recipe, a launch file and a machine, or what would be run. Starts nothing.

    Raises:
        Mistakes: of the recipe, of the launch and between the three, at once.
    """
    recipe, mistakes, machine = None, [], Machine((), 0, False, False)
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
    except Mistakes as error:
        mistakes += error.mistakes
    launch, launch_mistakes = examine_launch(arguments.launch)
    mistakes += launch_mistakes
    try:
        machine = describe_machine(arguments.machine) if arguments.machine is not None else this_machine()
    except Mistakes as error:
        raise Mistakes(*mistakes, *error.mistakes) from None
    if launch is not None:
        # Where the recipe cannot be read, the launch still has to fit the machine.
        mistakes += (
            find_launch_mistakes(launch, machine, arguments.recipe)
            if recipe is None
            else find_mistakes(recipe, launch, machine, arguments.recipe)
        )
    if mistakes or recipe is None or launch is None:
        raise Mistakes(*mistakes)

    rows = recipe.optim.micro_batch * recipe.optim.grad_accum * launch.processes
    print(f"{arguments.recipe} with {arguments.launch}: no mistakes")
    print(f"  processes  {launch.processes} on {launch.machines} machine{'s' if launch.machines > 1 else ''}, {launch.strategy}")
    print(f"  method     {recipe.method.kind}, {precision(recipe, launch, machine)}")
    print(
        f"  step       {recipe.optim.micro_batch} x {recipe.optim.grad_accum} x {launch.processes} = {rows} rows, "
        f"{rows * recipe.data.seq_len:,} tokens"
    )
    for note in find_notes(launch):
        print(f"  note       {note}")


def data(arguments: argparse.Namespace) -> None:
    """Prepare the data of a recipe, as the run would and for it, and show what became of it. Reads the tokenizer, no weights.

    Raises:
        Mistakes: of the recipe, its model's folder and its data.
    """
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from finetune import corpus, model  # torch is needed by the tokenizer alone, and takes seconds
    from finetune.describe import describe, show_row
    from finetune.shape import read_shape

    folder = model.fetch(recipe.model)
    shape, tokenizer = read_shape(folder), model.load_tokenizer(folder)
    rows = corpus.prepare(recipe.data, tokenizer, recipe.run.seed, shape.positions, shape.vocab_size)
    print(f"{describe(rows.manifest())}\n\nthe first row ([[ ]] is not learnt):\n{show_row(rows.first_row(), tokenizer)}")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, which takes the parsed arguments."""
    parser = argparse.ArgumentParser(prog="python -m finetune", description="Everything but training, which is train.py.")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser("check", help="find the mistakes of a recipe, a launch file and a machine; starts nothing")
    command.add_argument("recipe", help="recipes/NAME.yaml")
    command.add_argument("overrides", nargs="*", help="section.key=value, as for train.py")
    command.add_argument("--launch", required=True, metavar="FILE", help="the accelerate YAML")
    command.add_argument("--machine", help="another machine than this one, as in 4xT4 or 4xT4,host=120,compiler=no")
    command.set_defaults(run=check)

    command = commands.add_parser("data", help="prepare a recipe's data as the run would, and show what became of it; trains nothing")
    command.add_argument("recipe", help="recipes/NAME.yaml")
    command.add_argument("overrides", nargs="*", help="section.key=value, as for train.py")
    command.set_defaults(run=data)
    return parser


def parse_arguments(command_line: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line (`sys.argv`'s where it is None); ends the process with code 2 where it is not understood."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(command_line)
    # argparse fills a list of positionals once: overrides that stand behind an option are left over.
    if any(argument.startswith("-") or "=" not in argument for argument in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.overrides += rest
    return arguments


def main() -> None:
    arguments = parse_arguments()
    silence()
    try:
        with file_errors_are_mistakes():
            arguments.run(arguments)
        sys.stdout.flush()
    except Mistakes as error:
        exit_with(error)
    except BrokenPipeError:  # whoever read the output has gone
        os._exit(1)


if __name__ == "__main__":
    main()
