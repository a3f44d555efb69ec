"""Check a converted script: its text, and its runs against those of the plain notebook.

Every check returns findings: short sentences, none where all is well. They are pure functions of a script's text and
of `Outcome`s, so that a test can hand them bad ones.
"""

import ast
import io
import json
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

from harness import Cell, Outcome
from patches import INSTALL, is_install

MAIN_ONLY = ("save", "generate", "print", "push", "install", "shell", "display", "input", "server")
ON_RANK_0 = ("save", "generate", "print", "push", "shell", "server")
SHELL_CALLS = ("system", "run", "Popen", "call", "check_call", "check_output", "getoutput", "popen")


def compiles(script: str, python: str) -> list[str]:
    """Return whether the script compiles with the Python that the notebooks are written for."""
    code = "import sys; compile(sys.stdin.buffer.read(), 'script.py', 'exec')"
    done = subprocess.run([python, "-I", "-S", "-c", code], input=script.encode(), capture_output=True)
    return [] if done.returncode == 0 else ["does not compile: " + done.stderr.decode().strip().splitlines()[-1]]


def leftovers(script: str) -> list[str]:
    """Names and commands only a notebook has, in the code (not in comments or strings)."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(script).readline):
        if token.type == tokenize.NAME and token.string == "get_ipython":
            found.append(f"get_ipython in line {token.start[0]}")
        if token.type == tokenize.ERRORTOKEN and token.string in "!%?":
            found.append(f"{token.string} in line {token.start[0]}")
    return found


# Strings that DDP has to replace: device maps that spread a model, and numbers of GPUs.
GIVES_WAY = re.compile(r"auto|balanced|balanced_low_0|sequential|unsloth|mps|cuda(:\d+)?")


# Lines that a script has otherwise: magics, what only a host has, and variables that are the launcher's to set.
SETS_RANKS = re.compile(
    r"get_ipython|google\.colab|drive\.mount|files\.download|environ.*(CUDA_VISIBLE_DEVICES|WORLD_SIZE|RANK|MASTER_(ADDR|PORT))"
)


def words(source: str) -> Counter[str]:
    """The string literals and comments of some Python, but for those in lines that were magics or commands."""
    found: Counter[str] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) and not SETS_RANKS.search(token.line):
            found[re.sub(r"[ \t\r]+(\n|\Z)", r"\1", token.string)] += 1  # IPython drops spaces at the end of lines
    return found


def text_kept(cells: list[Cell], script: str) -> list[str]:
    """Check that comments and string literals are still there, or quoted by the converter; installs are exempt."""
    have, found = words(script), []
    quoted = "\n".join(line for line in script.splitlines() if line.lstrip().startswith("# ddp:"))
    for cell in cells:
        if INSTALL.search(cell.source.replace("', '", " ")):  # also `run_line_magic('pip', 'install ...')`
            continue
        try:
            lost = list(words(cell.source) - have)
        except (tokenize.TokenError, SyntaxError):  # not this Python's syntax
            continue
        lost = [text for text in lost if text not in quoted and not GIVES_WAY.fullmatch(text.strip("\"'"))]
        found += [f"cell {cell.number} loses {text[:60]!r}" for text in lost]
    return found


def installs_run(ranks: list[Outcome]) -> list[str]:
    """Installs that a run would have done."""
    return [f"rank {rank} {describe(event)}" for rank, one in enumerate(ranks) for event in one.of("install")]


def installs(script: str) -> list[str]:
    """Calls that would run an installer, as far as their command is written out."""
    try:
        tree = ast.parse(script)
    except SyntaxError:  # newer syntax than this process's Python; the runs still record what is installed
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SHELL_CALLS:
            words = [n.value for a in node.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
            if is_install(" ".join(str(word) for word in words)):
                found.append(f"an install in line {node.lineno}")
    return found


def reaches_training(plain: Outcome, ranks: list[Outcome]) -> list[str]:
    """Every rank trains as often as the plain notebook, and gets as far."""
    found = []
    for rank, outcome in enumerate(ranks):
        if len(outcome.trains) < len(plain.trains):
            found.append(f"rank {rank} trains {len(outcome.trains)} times, plain {len(plain.trains)}{why(outcome)}")
        elif plain.ended_well and not outcome.ended_well:
            found.append(f"rank {rank} stops where plain ends well{why(outcome)}")
    return found


def why(outcome: Outcome) -> str:
    """The error that ended a run, in brackets."""
    error = outcome.error
    return f" ({error['type']}: {error['text'][:120]} at {error['at']})" if error else ""


def main_only(rank_1: Outcome, script: str = "") -> list[str]:
    """No side effect on a rank that is not the main process; what generates for the training, the script must say."""
    bad = [e for e in rank_1.of(*MAIN_ONLY) if e["kind"] != "generate" or "every process generates here" not in script]
    found = [f"rank 1 {describe(e)}" for e in bad[:20]]
    return found + ([f"rank 1: {len(bad) - 20} more side effects"] if len(bad) > 20 else [])


def saved_paths(outcome: Outcome) -> list[str]:
    """Return what a run's saves were given first: the path."""
    return [event["text"].split(",")[0] for event in outcome.of("save") if event.get("text")]


def read_back(rank_0: Outcome, rank_1: Outcome, node_1: Outcome | None = None) -> list[str]:
    """Only the main process reads what only it saved: on another machine those files do not exist.

    Args:
        node_1: the run of the first process of a second machine, which may save the same there.
    """
    there = set(saved_paths(node_1)) if node_1 else set()
    saved = [path for path in saved_paths(rank_0) if path not in there]
    return [
        f"rank 1 reads what rank 0 saved: {event['name']} at {event['at']}"
        for event in rank_1.of("read")
        if any(event["text"] == path or event["text"].startswith(path + "/") for path in saved)
    ]


def describe(event: dict[str, Any]) -> str:
    """An event in a few words."""
    phase = f" during {event['phase'].removeprefix('in_')}ing" if event.get("phase") else ""
    return f"{event['kind']} {event['name']} at {event['at']}{phase}: {event.get('text', '')[:60]}"


def effect(event: dict[str, Any]) -> str:
    """Return the kind that an event is counted as: `!cmd` may become any call that runs the command."""
    return str(event["kind"]) if event["kind"] == "shell" else f"{event['kind']} {event['name']}"


def kept(plain: Outcome, rank_0: Outcome) -> list[str]:
    """Everything the notebook did for its reader still happens, once, on the main process."""
    if not plain.ended_well:  # the script need not stop at the same line, so there is nothing to compare
        return []
    installing = {event["at"].split(":")[0] for event in plain.of("install")}
    want = Counter(
        effect(event)
        for event in plain.of(*ON_RANK_0)
        # What an installing cell runs besides (which GPU is it? which version?) goes with the install.
        if event["kind"] != "shell" or event["at"].split(":")[0] not in installing
        # A line that a cell leaves open (`end=""`) goes on in the script.
        if event["kind"] != "print" or event["at"]
    )
    have = Counter(effect(event) for event in rank_0.of(*ON_RANK_0))
    return [
        f"rank 0 has {have[name]} of {count}: {name}{missing(plain, rank_0, name)}"
        for name, count in want.items()
        if have[name] < count
    ]


def missing(plain: Outcome, rank_0: Outcome, name: str) -> str:
    """The first of the plain run's events that has no counterpart, with its cell."""
    have = Counter(event.get("text", "") for event in rank_0.events if effect(event) == name)
    for event in plain.events:
        if effect(event) == name:
            text = event.get("text", "")
            if not have[text]:
                return f" (first: {event['at']} {text[:50]!r})"
            have[text] -= 1
    return ""


def in_step(ranks: list[Outcome]) -> list[str]:
    """All ranks pass the same collectives in the same order; a difference is a deadlock."""
    paths = [[e["name"] for e in outcome.of("collective")] for outcome in ranks]
    if not all(outcome.ended_well for outcome in ranks):  # a rank that fails ends the job: only the way there counts
        paths = [path[: min(len(p) for p in paths)] for path in paths]
    for rank, path in enumerate(paths[1:], 1):
        if path == paths[0]:
            continue
        at = next((i for i, (a, b) in enumerate(zip(paths[0], path, strict=False)) if a != b), None)
        at = min(len(paths[0]), len(path)) if at is None else at
        longer = ranks[0] if len(paths[0]) > at else ranks[rank]
        where = longer.of("collective")[at]["at"]
        return [f"collectives differ: rank 0 has {len(paths[0])}, rank {rank} {len(path)}; first difference at {where}"]
    return []


UNSLOTH = re.compile(r"^\s*(from|import) unsloth", re.MULTILINE)


def settings(plain: Outcome, ranks: list[Outcome], script: str = "") -> list[str]:
    """device_map bound to the local rank at load; the DDP arguments set in every trainer; the global batch kept.

    No search for unused weights with Unsloth; elsewhere Transformers decides, or the notebook.

    A trainer that is given no arguments has no place for them; the script must warn of it.
    """
    found = []
    searches = (None, False, *(event["settings"].get("ddp_find_unused_parameters") for event in plain.trains))
    for rank, outcome in enumerate(ranks):
        if len(outcome.trains) < len(plain.trains):
            found.append(f"rank {rank} does not train: its settings are not seen")
        for event in before_training(outcome, "load"):
            if event["name"].startswith("Fast") and event["device_map"] != {"": rank}:
                found.append(f"rank {rank} loads with device_map {event['device_map']} at {event['at']}")
        for event in outcome.trains:
            given = event["settings"]
            if not event.get("arguments", True) and "has no arguments object" in script:
                continue
            search = (False,) if UNSLOTH.search(script) else searches
            for name, want in (("ddp_find_unused_parameters", search), ("average_tokens_across_devices", (True,))):
                if given.get(name) not in want:
                    found.append(f"rank {rank} trains with {name} = {given.get(name, 'absent')} at {event['at']}")
    for before, after in zip(plain.trains, ranks[-1].trains, strict=False):
        if after.get("arguments", True) or "has no arguments object" not in script:
            found += batch_changed(before, after, len(ranks))
    return found


def before_training(outcome: Outcome, *kinds: str) -> list[dict[str, Any]]:
    """The events of these kinds up to the first train()."""
    end = next((i for i, event in enumerate(outcome.events) if event["kind"] == "train"), len(outcome.events))
    return [event for event in outcome.events[:end] if event["kind"] in kinds]


def global_batch(event: dict[str, Any], world: int) -> int:
    """Rows an optimizer step sees, from a train event.

    Where the generations of a prompt do not divide it, Unsloth raises the batch of a process to their number.
    """
    given = event["settings"]
    batch = int(given.get("per_device_train_batch_size", 8))
    steps = int(given.get("gradient_accumulation_steps", 1))
    group = int(given.get("num_generations", 8)) if event["name"].startswith("GRPO") else 1
    return (group if batch * steps * world % group else batch) * steps * world


ALLOWED = (
    "device_map", "offload_embedding", "per_device_train_batch_size", "gradient_accumulation_steps",
    "ddp_find_unused_parameters", "average_tokens_across_devices",
)  # fmt: skip


def same_training(plain: Outcome, outcome: Outcome, rank: int = 0) -> list[str]:
    """The model, the data and the arguments of every training are the notebook's, but for what DDP needs.

    Ranks other than 0 may lack loads of models that are only tried: the trainers' events say which load is theirs.
    """
    if not plain.trains or len(outcome.trains) < len(plain.trains):  # nothing to compare; reaches_training says so
        return []
    found = []
    want, have = training_steps(plain, len(plain.trains)), training_steps(outcome, len(plain.trains))
    for name, steps in want.items():
        there = have.get(name, [])
        if rank and name.startswith("load ") and is_part(there, steps):
            continue
        if len(steps) != len(there):
            found.append(
                f"{name} happens {len(there)} times before training, was {len(steps)}{first_place(outcome, name)}"
            )
        for before, after in zip(steps, there, strict=False):
            if before != after:
                found.append(f"{name} differs: {difference(before, after)}")
    found += [f"{name} is new before training{first_place(outcome, name)}" for name in have if name not in want]
    return found


def is_part(part: list[Any], whole: list[Any]) -> bool:
    """Return whether a list is what is left of another with some items taken out."""
    rest = iter(whole)
    return all(any(item == other for other in rest) for item in part)


def training_steps(outcome: Outcome, trains: int) -> dict[str, list[Any]]:
    """Return the events that shape the first `trains` trainings, by name.

    These are loads, preparations, attributes set, and trainers with their data.
    """
    ends = [i for i, event in enumerate(outcome.events) if event["kind"] == "train"]
    steps: dict[str, list[Any]] = {}
    for event in outcome.events[: ends[trains - 1] if ends else 0]:
        if event["kind"] in ("load", "prepare", "set", "trainer") and not event["name"].endswith(".grad"):
            name = f"{event['kind']} {event['name']}"
            steps.setdefault(name, []).append(without(ALLOWED, [event.get("given"), event.get("config")]))
    return steps


def without(names: tuple[str, ...], value: Any) -> Any:
    """A nested value without these keys."""
    if isinstance(value, dict):
        return {k: without(names, v) for k, v in value.items() if k not in names}
    return [without(names, v) for v in value] if isinstance(value, list) else value


def difference(before: Any, after: Any, path: str = "") -> str:
    """The first place where two nested values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in {**before, **after}:
            if before.get(key, "absent") != after.get(key, "absent"):
                return difference(before.get(key, "absent"), after.get(key, "absent"), f"{path}.{key}")
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                return difference(one, other, f"{path}[{index}]")
    return f"{path} {str(before)[:80]!r} -> {str(after)[:80]!r}"


def first_place(outcome: Outcome, name: str) -> str:
    """Return the index of the first event of that name."""
    return next((f" at {e['at']}" for e in outcome.events if f"{e['kind']} {e['name']}" == name), "")


def batch_changed(before: dict[str, Any], after: dict[str, Any], world: int) -> list[str]:
    """Return whether an optimizer step sees another number of rows, when the processes could share the notebook's."""
    was, now = global_batch(before, 1), global_batch(after, world)
    if was == now or (was % world and abs(now - was) < world):  # the nearest that every process has a share of
        return []
    return [f"global batch {now}, was {was} at {after['at']}"]


def start_and_end(plain: Outcome, ranks: list[Outcome]) -> list[str]:
    """The device is chosen first, Unsloth sees the environment it needs at import, the process group is destroyed."""
    found = []
    wanted = imported_with(plain)
    for rank, outcome in enumerate(ranks):
        first = next((event for event in outcome.of("device", "load", "trainer")), None)
        if first is None and not outcome.ended_well and not plain.ended_well:
            continue  # as the notebook did, it stopped before it needed a device
        if first is None or first["kind"] != "device" or first["index"] != rank:
            found.append(f"rank {rank} does not begin with torch.cuda.set_device({rank})")
        groups = [event["name"] for event in outcome.of("group")]
        if outcome.ended_well and groups and groups[-1] != "destroy":
            found.append(f"rank {rank} does not destroy its process group")
        have = imported_with(outcome)
        if have is None:
            continue
        for name in [n for n, v in {**(wanted or {}), **FLAGS}.items() if have.get(n) != v]:
            found.append(f"rank {rank} imports unsloth with {name} = {have.get(name)}")
    return found


FLAGS = {"UNSLOTH_DISABLE_TRAINER_PATCHING": "1", "UNSLOTH_NO_CUDA_EXTENSIONS": "1"}


def imported_with(outcome: Outcome) -> dict[str, str] | None:
    """Return the environment at the import of unsloth, or None if it was not imported."""
    found = (event["environment"] for event in outcome.of("import") if event["name"] == "unsloth")
    return next((in_place(environment) for environment in found), None)


def in_place(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment with `.` for the folder of the run, which has another name in each."""
    return {name: re.sub(r"/\S*?/stubrun\w+/cwd", ".", value) for name, value in environment.items()}


def data(ranks: list[Outcome]) -> list[str]:
    """The main process prepares data first, the others after it has; what is random is the same on every rank."""
    found = [
        f"{event['name']} without a seed at {event['at']}"
        for event in before_training(ranks[0], "random")
        if not event["seeded"]
    ]
    first, other = iter(waits_before_data(ranks[0])), waits_before_data(ranks[1])
    for name_1, at, waits_1 in other:
        # The main process alone may load more, to show it.
        waits_0 = next((waits for name, _, waits in first if name == name_1), None)
        if waits_0 is None and ranks[0].error:
            return found  # it stopped before this
        if waits_0 is None:
            return [*found, f"rank 1 alone prepares data: {name_1} at {at}"]
        if waits_1 <= waits_0:
            found.append(f"{name_1} on every rank at once at {at}")
    return found


def waits_before_data(outcome: Outcome) -> list[tuple[str, str, int]]:
    """Each preparation of data before training: its name, its line, and how many collectives came before it."""
    steps, waits = [], 0
    for event in before_training(outcome, "collective", "data", "download"):
        waits += event["kind"] == "collective"
        if event["kind"] != "collective" and event["name"] != "urlopen":  # which leaves nothing on disk to race for
            steps.append((event["name"], event["at"], waits))
    return steps


def single(plain: Outcome, alone: Outcome) -> list[str]:
    """Started by plain `python` the script does what the notebook does."""
    found = reaches_training(plain, [alone]) + kept(plain, alone)
    for before, after in zip(plain.trains, alone.trains, strict=False):
        found += batch_changed(before, after, 1)
    return [text.replace("rank 0", "alone", 1) for text in found]


def read_text(notebook: Path) -> str:
    """The code of a notebook as one text, to look for version pins."""
    try:
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError):
        return ""
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def cause(finding: str) -> str:
    """A finding without line numbers and names, to group by."""
    finding = re.sub(r"(at )?(script|cell_\d+)\.py:\d+.*", "", finding)
    return re.sub(r"\d+", "N", finding).strip(" (:")


def same_process(plain: Outcome, ranks: list[Outcome]) -> list[str]:
    """Each training finds the same variables and folder on every rank, and what the launcher set."""
    found = []
    for before, *after in zip(plain.trains, *(outcome.trains for outcome in ranks), strict=False):
        wanted = in_place(before["process"]["variables"])
        for rank, event in enumerate(after):
            have, launched = in_place(event["process"]["variables"]), event["process"]["ranks"]
            names = [n for n in {**wanted, **have} if wanted.get(n) != have.get(n) and not GIVEN.match(n)]
            found += [f"rank {rank} trains with {name} = {have.get(name)}, was {wanted.get(name)}" for name in names]
            if launched[:3] != [str(rank), str(rank), str(len(ranks))] or None in launched:
                found.append(f"rank {rank} trains with the launcher's variables {launched}")
        folders = {event["process"]["folder"] for event in after}
        found += [f"the ranks train in different folders: {sorted(folders)}"] if len(folders) > 1 else []
    return found


# Variables that differ for a reason: of the run itself, secrets of a host, and the GPUs, which the launcher chooses.
GIVEN = re.compile(r"HOME$|PWD$|PATH$|OLDPWD$|LC_ALL$|CUDA_VISIBLE_DEVICES$|\w*(TOKEN|KEY|SECRET)\w*$|WANDB_MODE$|KMP_")


def same_changes(ranks: list[Outcome]) -> list[str]:
    """Before each training every rank calls the same methods on the models, and sets the same attributes."""
    if not all(outcome.trains for outcome in ranks):
        return []  # nothing says where the training is, or one of them stopped where the stubs could not follow
    first, other = (
        Counter(f"{e['kind']} {e['name']}" for e in before_training(o, "touch", "set") if "wandb." not in e["name"])
        for o in ranks[:2]
    )
    return [
        f"{name} {first[name]} times on rank 0 and {other[name]} on rank 1"
        for name in first | other
        if first[name] != other[name]
    ]


def refused_arguments(plain: Outcome, ranks: list[Outcome], fields: dict[str, list[str]]) -> list[str]:
    """Arguments that a script adds are fields of the real class, where that is installed here.

    Args:
        fields: the names of each class's parameters.
    """
    if not plain.of("trainer"):
        return []  # the plain notebook stopped before it: nothing says which arguments are its own
    want, have = (set().union(*(e.get("config") or {} for e in o.of("trainer")), set()) for o in (plain, ranks[0]))
    classes = {(event.get("config") or {}).get("class") for event in ranks[0].of("trainer")}
    known = [set(fields[name]) for name in classes if name in fields]
    return [
        f"{name} is no argument of {sorted(map(str, classes))}"
        for name in sorted(have - want - {"class"})
        if known and not any(name in one for one in known)
    ]
