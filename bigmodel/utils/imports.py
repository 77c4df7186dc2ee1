"""The names of ``accelerate.utils.imports``: which packages and devices there are."""

from bigmodel.compat.deepspeed import deepspeed_required as deepspeed_required
from bigmodel.compat.float8 import torchao_required as torchao_required
from bigmodel.utils.available import is_4bit_bnb_available as is_4bit_bnb_available
from bigmodel.utils.available import is_8bit_bnb_available as is_8bit_bnb_available
from bigmodel.utils.available import is_aim_available as is_aim_available
from bigmodel.utils.available import is_amdsmi_available as is_amdsmi_available
from bigmodel.utils.available import is_bf16_available as is_bf16_available
from bigmodel.utils.available import is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available
from bigmodel.utils.available import is_bnb_available as is_bnb_available
from bigmodel.utils.available import is_boto3_available as is_boto3_available
from bigmodel.utils.available import is_clearml_available as is_clearml_available
from bigmodel.utils.available import is_comet_ml_available as is_comet_ml_available
from bigmodel.utils.available import is_cuda_available as is_cuda_available
from bigmodel.utils.available import is_datasets_available as is_datasets_available
from bigmodel.utils.available import is_deepspeed_available as is_deepspeed_available
from bigmodel.utils.available import is_dvclive_available as is_dvclive_available
from bigmodel.utils.available import is_fp8_available as is_fp8_available
from bigmodel.utils.available import is_fp16_available as is_fp16_available
from bigmodel.utils.available import is_habana_gaudi1 as is_habana_gaudi1
from bigmodel.utils.available import is_hpu_available as is_hpu_available
from bigmodel.utils.available import is_import_timer_available as is_import_timer_available
from bigmodel.utils.available import is_lomo_available as is_lomo_available
from bigmodel.utils.available import is_matplotlib_available as is_matplotlib_available
from bigmodel.utils.available import is_megatron_lm_available as is_megatron_lm_available
from bigmodel.utils.available import is_mlflow_available as is_mlflow_available
from bigmodel.utils.available import is_mlu_available as is_mlu_available
from bigmodel.utils.available import is_mps_available as is_mps_available
from bigmodel.utils.available import is_msamp_available as is_msamp_available
from bigmodel.utils.available import is_musa_available as is_musa_available
from bigmodel.utils.available import is_neuron_available as is_neuron_available
from bigmodel.utils.available import is_npu_available as is_npu_available
from bigmodel.utils.available import is_numpy_available as is_numpy_available
from bigmodel.utils.available import is_pandas_available as is_pandas_available
from bigmodel.utils.available import is_peft_available as is_peft_available
from bigmodel.utils.available import is_pippy_available as is_pippy_available
from bigmodel.utils.available import is_pynvml_available as is_pynvml_available
from bigmodel.utils.available import is_pytest_available as is_pytest_available
from bigmodel.utils.available import is_rich_available as is_rich_available
from bigmodel.utils.available import is_rocm_available as is_rocm_available
from bigmodel.utils.available import is_sagemaker_available as is_sagemaker_available
from bigmodel.utils.available import is_schedulefree_available as is_schedulefree_available
from bigmodel.utils.available import is_sdaa_available as is_sdaa_available
from bigmodel.utils.available import is_swanlab_available as is_swanlab_available
from bigmodel.utils.available import is_tensorboard_available as is_tensorboard_available
from bigmodel.utils.available import is_timm_available as is_timm_available
from bigmodel.utils.available import is_torch_distributed_available as is_torch_distributed_available
from bigmodel.utils.available import is_torch_xla_available as is_torch_xla_available
from bigmodel.utils.available import is_torchao_available as is_torchao_available
from bigmodel.utils.available import is_torchdata_available as is_torchdata_available
from bigmodel.utils.available import (
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
)
from bigmodel.utils.available import is_torchvision_available as is_torchvision_available
from bigmodel.utils.available import is_tqdm_available as is_tqdm_available
from bigmodel.utils.available import is_trackio_available as is_trackio_available
from bigmodel.utils.available import is_transformer_engine_available as is_transformer_engine_available
from bigmodel.utils.available import is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available
from bigmodel.utils.available import is_transformers_available as is_transformers_available
from bigmodel.utils.available import is_triton_available as is_triton_available
from bigmodel.utils.available import is_wandb_available as is_wandb_available
from bigmodel.utils.available import is_weights_only_available as is_weights_only_available
from bigmodel.utils.available import is_xccl_available as is_xccl_available
from bigmodel.utils.available import is_xpu_available as is_xpu_available

USE_TORCH_XLA = False
"""Whether PyTorch may run on TPUs: never here."""
