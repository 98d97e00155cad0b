"""The command line `strata`: parses, calls, turns errors into a message on stderr and an exit code. Decides nothing.

Each command imports what it needs when it runs: `strata plan` starts without kopf, kubernetes or ZeroMQ.
Exit codes: 0 done, 1 it cannot be done (infeasible, refused, crashed), 2 the input is wrong.
"""
# ruff: noqa: PLC0415  commands import late, so that each starts fast

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="strata",
    help="Serve a large language model on unlike devices: plan it, run it here, or let Kubernetes run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

DeploymentFile = Annotated[
    Path, typer.Option("-f", "--file", help="The LLMDeployment: exactly the object that `kubectl apply` takes.")
]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="The devices to plan for, as YAML; without it, those of this machine.")
]


LatencyProfileFile = Annotated[
    Path | None,
    typer.Option(
        "--profile", help="What `strata profile` measured of this model; of CPU devices the kept one is found."
    ),
]


def _show_version(wanted: bool) -> None:  # noqa: FBT001  typer gives it so
    if wanted:
        from importlib.metadata import version

        typer.echo(f"strata {version('strata-llm')}")
        raise typer.Exit


@app.callback()
def main_options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve a large language model on unlike devices: plan it, run it here, or let Kubernetes run it."""


@app.command()
def plan(  # noqa: PLR0913  one parameter per option
    file: DeploymentFile,
    cluster: ClusterFile = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure this processor instead of assuming its rates (needs the runtime)."),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", help="Write the plan as an SVG: layers by precision above the micro-batches' timeline."
        ),
    ] = None,
    running: Annotated[
        Path | None,
        typer.Option(
            "--running",
            help="A plan in force, as printed by --json: change it as little as pays, and say in which steps.",
        ),
    ] = None,
    shapes_only: Annotated[
        bool, typer.Option("--shapes-only", help="Plan also for a model that the runtime cannot serve.")
    ] = False,
    costs: Annotated[
        list[str] | None,
        typer.Option(
            "--costs",
            help="Where seconds come from: `auto` (operator tables where the extra `profiles` is installed), `roofline`, "
            "`vllm`, `trtllm` or `sglang` (as that engine would run it), or a file with a layer table (repeatable).",
        ),
    ] = None,
    profile: LatencyProfileFile = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="What other devices would change: `+2xL4@c` adds to a node, there or new, `-1xL4@a` takes away, `-b` takes the node away "
            "(repeatable; each by itself). For devices of the plan that are taken away, also the repair that a loss would lead to at once.",
        ),
    ] = None,
    next_device: Annotated[
        list[str] | None,
        typer.Option(
            "--next-device",
            metavar="TYPE",
            help="What one more device of the type would bring, also for its price: `all` ranks the whole catalogue (repeatable).",
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="NODE", help="The node that the next device is for; a new one by default."),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price", metavar="TYPE=AMOUNT", help="An hour of one device, as `hourlyCost` in the cluster (repeatable)."
        ),
    ] = None,
    front: Annotated[
        bool, typer.Option("--front", help="The best plans of 3, 4, 8 and 16 bits beside each other: rate and quality.")
    ] = False,
) -> None:
    """Show which layers would run where, at which precision, and what that should give. Nothing is started.

    The smallest cluster file:

        nodes: [{name: a, devices: [{type: cpu, count: 1, memoryBytes: 400000000}]}]

    Example: `strata plan -f deployment.yaml --cluster cluster.yaml`
    """
    from strata_operator.commands import plan as command
    from strata_operator.commands.studies import StudyOptions

    chosen = tuple(costs or ())
    studies = StudyOptions(tuple(what_if or ()), tuple(next_device or ()), on, tuple(price or ()), front)
    command.run(
        command.PlanOptions(file, cluster, picture, running, chosen, json, measure, shapes_only, profile, studies)
    )


@app.command()
def simulate(  # noqa: PLR0913  one parameter per option
    file: DeploymentFile,
    cluster: ClusterFile = None,
    *,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests as csv: TIMESTAMP,ContextTokens,GeneratedTokens, as the Azure traces have them."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second: a Poisson process of the workload's lengths, or what a trace is scaled to."
        ),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests in flight: each comes as soon as another has its answer. Without --trace and --rate the workload's concurrency.",
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="How many; by default 1000, or the whole trace.")] = None,
    seed: Annotated[int, typer.Option(help="Of the Poisson process.")] = 0,
    slo: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Seconds to the first token and for each other: shows how many requests stay within both."),
    ] = None,
    costs: Annotated[list[str] | None, typer.Option(help="Where seconds come from, as for `strata plan`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON and nothing else.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this processor and use what `strata profile` kept.")
    ] = False,
    profile: LatencyProfileFile = None,
) -> None:
    """Plan a deployment and run the plan under a trace in virtual time: latencies, throughput, how busy each stage is.

    Example: `strata simulate -f deployment.yaml --cluster cluster.yaml --rate 2 --slo 1 0.1`
    """
    from strata_operator.commands import simulate as command

    arrivals = command.Arrivals(trace, rate, requests, seed, clients)
    command.run(command.SimulateOptions(file, cluster, arrivals, slo, tuple(costs or ()), json, measure, profile))


@app.command()
def up(  # noqa: PLR0913, PLR0917  one parameter per option
    file: DeploymentFile,
    cluster: ClusterFile = None,
    port: Annotated[int, typer.Option(help="Port of the OpenAI-compatible endpoint; 0: any free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Address of the endpoint.")] = "127.0.0.1",
    api_keys_file: Annotated[
        Path | None, typer.Option(help="Keys that clients must present, one per line; without it the endpoint is open.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the processes' logs; by default one that is removed at the end.")
    ] = None,
    profile: LatencyProfileFile = None,
    *,
    no_verify: Annotated[
        bool,
        typer.Option("--no-verify", help="Do not compare any-precision copies with their checks as slots read them."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only plan and check files, port, memory and tokenizer; start nothing.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show in a table where the start's time went.")] = False,
) -> None:
    """Plan a deployment and run it here, one process per slot, until Ctrl-C or SIGTERM.

    Prints `ready: <url>` once it answers. A process that dies is started again and running requests go on.

    Example: `strata up -f deployment.yaml --port 8000`, then `curl http://127.0.0.1:8000/v1/models`
    """
    from strata_operator.commands import up as command

    options = command.UpOptions(file, cluster, host, port, api_keys_file, logs, profile, check)
    command.run(replace(options, verify=not no_verify, verbose=verbose))


@app.command()
def sensitivity(
    model: Annotated[str, typer.Argument(help="The model's folder, or its file:// or pvc:// uri.")],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text like what the model will see; by default heldout.txt of its folder.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Another place than beside the checkpoint, where plan and up look for it.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that statistics are taken of.")] = 8192,
    held_back_tokens: Annotated[
        int, typer.Option(min=0, help="Other tokens to measure losses on, for bounds in perplexity; 0: none.")
    ] = 16384,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> None:
    """Calibrate a model: which layers mind lower precision, and what it costs in perplexity (needs the runtime).

    Writes strata-sensitivity.json beside the checkpoint; `strata plan` and `strata up` use it from then on.

    Example: `strata sensitivity examples/models/strata-tiny`
    """
    from strata_operator.commands import sensitivity as command

    command.run(command.SensitivityOptions(model, text, output, tokens, held_back_tokens, device))


@app.command()
def quantize(  # noqa: PLR0913  one parameter per option
    model: Annotated[str, typer.Argument(help="The model's folder, or its file://, pvc:// or hf:// uri.")],
    *,
    method: Annotated[
        Literal["any-precision", "gptq"],
        typer.Option(help="One copy that gives 3 to 8 bits, or a GPTQ checkpoint of its own."),
    ] = "any-precision",
    bits: Annotated[
        int | None, typer.Option(help="The most that the copy gives, by default 8; of a GPTQ checkpoint, by default 4.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 text like what the model will see, to weigh errors by; gptq: else heldout.txt of its folder."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Of the text, at most.")] = 16384,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Where to; the copy by default beside the checkpoint, or in the node's cache if that is read-only."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    no_refit: Annotated[
        bool, typer.Option("--no-refit", help="With --text: weigh errors alone, do not fit tables to the inputs.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Make nothing: read the copy and compare its checksums.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON and nothing else.")] = False,
) -> None:
    """Quantize a model once, so that slots load any of 3 to 8 bits at once (needs the runtime). Goes on where it was stopped.

    Example: `strata quantize examples/models/strata-tiny --text examples/models/strata-tiny/heldout.txt`
    """
    from strata_operator.commands import quantize as command

    command.run(command.QuantizeOptions(model, method, bits, text, tokens, output, device, no_refit, verify, json))


@app.command()
def profile(  # noqa: PLR0913  one parameter per option
    file: Annotated[Path | None, typer.Option("-f", "--file", help="The LLMDeployment whose model to measure.")] = None,
    cluster: ClusterFile = None,
    *,
    model: Annotated[Path | None, typer.Option(help="Or a model's folder; its config.json is enough.")] = None,
    formats: Annotated[
        str,
        typer.Option(help="Of weights, as any3,any4,dense; without it those that plans of the deployment may choose."),
    ] = "",
    kv_bits: Annotated[
        int | None, typer.Option(help="Of keys and values, 8 or 16; without it the deployment's.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="0: those of the deployment's CPU devices, else all cores.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    device_type: Annotated[str, typer.Option("--type", help="What cluster files call the device.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Another place than the one where plan and up look.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Steps of at most 512 tokens: a minute less.")] = False,
    company: Annotated[
        int,
        typer.Option(min=0, max=64, help="Processes that decode meanwhile, as the other slots of this machine will."),
    ] = 0,
    ranks: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Also the strategies of a stage that so many devices share, each with --threads."
        ),
    ] = 1,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure these formats again even if they are kept.")] = False,
) -> None:
    """Measure what the model's own layers take on this device, in minutes (needs the runtime). Goes on where it was stopped;
    a profile that is kept is extended by the formats that it lacks.

    `strata up` and `strata plan --measure` use the profile from then on; `--profile FILE` gives one to plan and up.

    Example: `strata profile -f deployment.yaml`
    """
    from strata_operator.commands import profile as command

    names = tuple(part.strip() for part in formats.split(",") if part.strip())
    options = command.ProfileOptions(
        file, cluster, model, threads, device, device_type, output, quick, fresh, company, names, kv_bits, ranks
    )
    command.run(options)


@app.command()
def set_bits(
    name: Annotated[str, typer.Argument(help="The deployment's name; `strata up` runs it on this machine.")],
    layers: Annotated[str, typer.Option(help="Layers, counted from 0: 3-7,9.")],
    bits: Annotated[int, typer.Option(help="3 to 8, or 16.")],
    replica: Annotated[int | None, typer.Option(help="One replica; without it, all of them.")] = None,
) -> None:
    """Give layers of a running deployment more or fewer bits; requests that run go on.

    Needs the model's any-precision copy (`strata quantize`). Holds until the deployment is planned anew or a slot is started anew.

    Example: `strata set-bits tiny --layers 3-7 --bits 4`
    """
    from strata_operator.commands import set_bits as command

    command.run(command.SetBitsOptions(name, layers, bits, replica))


@app.command()
def demo() -> None:
    """Plan the quickstart of this checkout over unlike devices, run it, ask it something, stop it.

    Example: `strata demo`
    """
    from strata_operator.demo import run

    run()


@app.command()
def crds() -> None:
    """Print the CustomResourceDefinition.

    Example: `strata crds | kubectl apply -f -`
    """
    from strata_operator.crds import crd_yaml

    sys.stdout.write(crd_yaml())


@app.command()
def operator(  # noqa: PLR0913, PLR0917  one parameter per option
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to watch (repeatable); without it the whole cluster.")
    ] = None,
    runtime_image: Annotated[
        str, typer.Option(envvar="STRATA_RUNTIME_IMAGE", help="Image of slots and gateways that name none.")
    ] = "",
    health_port: Annotated[int, typer.Option(help="Port of /healthz; 0: none.")] = 8081,
    metrics_port: Annotated[int, typer.Option(help="Port of Prometheus metrics; 0: none.")] = 8080,
    lease_namespace: Annotated[
        str, typer.Option(envvar="POD_NAMESPACE", help="Namespace of the lease that picks the active operator.")
    ] = "default",
    lease_name: Annotated[str, typer.Option(help="Name of that lease.")] = "strata-operator",
    inventory: Annotated[
        Path | None,
        typer.Option(help="YAML with profiles of device types and link rates that the administrator knows."),
    ] = None,
    plans: Annotated[int, typer.Option(min=1, help="How many deployments are planned side by side.")] = 2,
    plan_memory_mib: Annotated[int, typer.Option(min=256, help="Most memory of one plan, MiB.")] = 768,
    plan_seconds: Annotated[
        int, typer.Option(min=1, help="Longest time limit of a plan, whatever spec.planning.timeLimitSeconds asks for.")
    ] = 300,
    tenants: Annotated[
        str, typer.Option(help="JSON: what deployments may put into pods beside the defaults (docs/security.md).")
    ] = "{}",
) -> None:
    """Run the operator: watch LLMDeployments and keep them planned, rendered and served. The chart starts it in a pod.

    Outside a cluster it uses the current kubeconfig context.

    Example: `strata operator --namespace default`
    """
    from strata_operator.act.handlers import OperatorOptions, run
    from strata_operator.act.plan_process import PlanLimits
    from strata_operator.api.tenants import TenantRules

    run(
        OperatorOptions(
            namespaces=tuple(namespace or ()),
            runtime_image=runtime_image,
            health_port=health_port,
            metrics_port=metrics_port,
            lease_namespace=lease_namespace,
            lease_name=lease_name,
            inventory_file=inventory,
            limits=PlanLimits(plans, plan_memory_mib << 20, float(plan_seconds)),
            tenants=TenantRules.parse(tenants),
        )
    )


def main() -> None:
    """The console script: every error that a user can act on ends here."""
    from strata_operator.commands.errors import exit_code, message

    try:
        app()
    except Exception as error:
        code = exit_code(error)
        if code is None:
            raise  # ours to repair: the traceback is the report
        sys.stderr.write(f"strata: {message(error)}\n")
        sys.exit(code)


if __name__ == "__main__":
    main()
