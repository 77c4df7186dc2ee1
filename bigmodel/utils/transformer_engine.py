"""The names of ``accelerate.utils.transformer_engine``, which is not supported: a call of any of them says so."""

from bigmodel.compat.refused import TRANSFORMER_ENGINE, refused

apply_fp8_autowrap = refused("apply_fp8_autowrap", TRANSFORMER_ENGINE)
contextual_fp8_autocast = refused("contextual_fp8_autocast", TRANSFORMER_ENGINE)
convert_model = refused("convert_model", TRANSFORMER_ENGINE)
has_transformer_engine_layers = refused("has_transformer_engine_layers", TRANSFORMER_ENGINE)
