"""`make demo`: plans examples/quickstart.yaml over two unlike devices, runs it, asks it something, measures it, stops it.

Everything is what `strata up` does, followed by a client. Needs a checkout: the examples are not part of the package.
"""

import asyncio
import sys
import time
from pathlib import Path

from rich.console import Console

from strata_operator.commands.errors import exit_code, message
from strata_operator.commands.inputs import Question, read_question
from strata_operator.errors import InvalidInputError
from strata_operator.local.client import drive, stream_chat
from strata_operator.local.deployment import LocalDeployment, LocalOptions
from strata_operator.local.machine import divisions_of_slots, threads_of_slots
from strata_operator.local.ports import free_port
from strata_operator.local.run import (
    Progress,
    interruptible,
    leave_on_signals,
    leaving_at_once,
    log_folder,
    log_to,
    run_until_stopped,
    serve,
)
from strata_operator.local.view import measured_table, show_plan
from strata_planner.contract.plan import Plan
from strata_planner.question.workload import Workload
from strata_planner.search.planning import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
DEPLOYMENT = EXAMPLES / "quickstart.yaml"
CLUSTER = EXAMPLES / "clusters" / "two-unlike-cpus.yaml"
HOST = "127.0.0.1"
QUESTION = "What does textwrap.dedent do?"
ANSWER_TOKENS = 96
REQUESTS_EACH = 5  # of a client, one after the other: plans are predicted for requests that follow each other
WARM_UP_TOKENS = 2  # the first request and the first batch of a shape pay for what is made once


def run(deployment_file: Path = DEPLOYMENT, cluster_file: Path = CLUSTER) -> None:
    """Raises what `commands.errors` knows."""
    begun = time.monotonic()
    out, console = Console(), Console(stderr=True)
    log_to(console)
    progress = Progress()
    leave_on_signals()
    with leaving_at_once(progress):
        _run(deployment_file, cluster_file, out, console, progress)
    out.print(f"everything has ended; {time.monotonic() - begun:.1f} s in all")


def _run(deployment_file: Path, cluster_file: Path, out: Console, console: Console, progress: Progress) -> None:
    if not deployment_file.exists():
        raise InvalidInputError(str(deployment_file), ["is not here; run the demo from a checkout of the repository"])
    out.rule("plan", align="left")
    progress.doing = "measuring the processor"
    question = read_question(deployment_file, cluster_file, measure=True)
    progress.enter("planning")
    outcome = interruptible(lambda: make_plan(question.request))
    show_plan(outcome, out)
    with log_folder(None) as logs:
        options = options_of(question, outcome.plan, logs)

        async def body() -> None:
            async with serve(outcome.plan, options, console) as deployment:
                progress.serving = True
                out.print(f"ready: {options.url}")
                await _show(deployment, question, out)

        out.rule("start", align="left")
        progress.enter("starting the processes and loading the model")
        run_until_stopped(body, progress)


def options_of(question: Question, plan: Plan, logs: Path) -> LocalOptions:
    return LocalOptions(
        served_model_name=question.deployment.name,
        logs=logs,
        host=HOST,
        port=free_port(HOST),
        threads=threads_of_slots(plan, question.cluster),
        divisions=divisions_of_slots(plan, question.cluster),
    )


async def _show(deployment: LocalDeployment, question: Question, out: Console) -> None:
    """One streamed answer, then the load that the plan was made for."""
    url, name = deployment.options.url, deployment.options.served_model_name
    out.rule("one chat request, streamed", align="left")
    out.print(f"> {QUESTION}", markup=False, highlight=False)

    def show(text: str) -> None:
        out.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    await asyncio.to_thread(stream_chat, url, name, "\n", WARM_UP_TOKENS, lambda _: None)
    one = await asyncio.to_thread(stream_chat, url, name, QUESTION, ANSWER_TOKENS, show)
    out.print(f"\n[{one.tokens} tokens, first after {one.first_token_seconds * 1e3:.0f} ms, then "
              f"{one.seconds_per_token * 1e3:.1f} ms each]", markup=False, highlight=False)  # fmt: skip
    load = question.request.workload
    out.rule(
        f"predicted beside measured: {load.concurrency} clients, requests of {load.prompt_tokens} + {load.output_tokens} tokens",
        align="left",
    )
    _compare(deployment.plan, await measured_tokens_per_second(deployment, load), out)
    out.print(measured_table(deployment.plan, deployment.slot_statuses))


async def measured_tokens_per_second(deployment: LocalDeployment, load: Workload) -> float:
    """Under the load that the plan was made for."""
    url, name = deployment.options.url, deployment.options.served_model_name
    await asyncio.to_thread(drive, url, name, load.concurrency, load.prompt_tokens, WARM_UP_TOKENS)
    lengths = (load.prompt_tokens, load.output_tokens)
    return await asyncio.to_thread(drive, url, name, load.concurrency, *lengths, REQUESTS_EACH)


def _compare(plan: Plan, tokens_per_second: float, out: Console) -> None:
    predicted = plan.prediction.tokens_per_second
    out.print(
        f"predicted {predicted:.0f} tokens/s, measured {tokens_per_second:.0f} tokens/s "
        f"({tokens_per_second / predicted:.2f} of the prediction)",
        highlight=False,
    )


if __name__ == "__main__":
    try:
        run()
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise
        sys.stderr.write(f"strata: {message(error)}\n")
        sys.exit(code)
