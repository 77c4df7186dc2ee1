"""bigmodel: run, serve and train models that do not fit their GPU.

    from bigmodel import from_pretrained

    model = from_pretrained("path/or/hub-id", max_memory={0: "10GiB", "cpu": "16GiB"})
    print(model.hf_device_map)

The public names are listed in `__init__.pyi` and imported when they are first used, so that importing the package costs
next to nothing.
"""

from bigmodel.lazy_names import lazy_names

__version__ = "0.1.0"
__getattr__, __dir__ = lazy_names(__name__)
