import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import sys


def say(question: str, answer: object) -> None:
    print(json.dumps([question, answer]), flush=True)


def error_of(statement: str) -> str:
    try:
        exec(statement, {})
    except ImportError as error:
        return str(error)
    return ""


def in_child(queue: object) -> None:
    import accelerate

    queue.put(accelerate.__version__)


def main() -> None:
    before = list(sys.meta_path)
    import bigmodel.compat

    say("importing the room patches nothing", sys.meta_path == before)
    say("report before", bigmodel.compat.report())
    bigmodel.compat.install()
    bigmodel.compat.install()
    say("imported by installing", [name for name in ("torch", "transformers", "accelerate") if name in sys.modules])
    import accelerate
    import accelerate.hooks

    import bigmodel.hooks

    say("version", accelerate.__version__)
    say("metadata", importlib.metadata.version("accelerate"))
    say("spec", importlib.util.find_spec("accelerate").name)
    say("hooks are one module", accelerate.hooks is bigmodel.hooks)
    say("attributes without import", accelerate.utils.modeling.__name__)
    say("unknown name", error_of("from accelerate import nothing"))
    say("unknown name of a module", error_of("from accelerate.hooks import nothing"))
    say("unknown module", error_of("import accelerate.nothing"))
    from transformers.utils import is_accelerate_available

    say("transformers sees it", is_accelerate_available("1.12.0"))
    say("spawned", _version_in_child())
    say("report", bigmodel.compat.report())


def _version_in_child() -> str:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=in_child, args=(queue,))
    child.start()
    version = queue.get(timeout=120)
    child.join()
    return str(version)


if __name__ == "__main__":
    main()
