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


def import_names() -> None:
    """Import the names that modules of transformers import before they load any model."""
    from accelerate import dispatch_model  # noqa: F401
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module  # noqa: F401
    from accelerate.utils import (  # noqa: F401
        extract_model_from_parallel,
        get_balanced_memory,
        get_max_memory,
        infer_auto_device_map,
        load_offloaded_weight,
        offload_weight,
        save_offload_index,
    )
    from accelerate.utils.deepspeed import HfDeepSpeedConfig  # noqa: F401
    from accelerate.utils.modeling import clean_device_map, get_max_layer_size  # noqa: F401


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

    import_names()
    rooms = ("checkpoint.", "dispatch.attach.builder", "plan.search.", "profile.trace.", "quantized.formats.")
    heavy = tuple(f"bigmodel.{room}" for room in rooms)
    say("imported with names", sorted(name for name in sys.modules if name.startswith(heavy)))
    say("version", accelerate.__version__)
    say("metadata", importlib.metadata.version("accelerate"))
    say("home page", importlib.metadata.metadata("accelerate")["Home-page"])
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
