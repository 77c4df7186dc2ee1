"""The names of ``accelerate.utils.megatron_lm``. Megatron-LM is not supported: a call of any of them says so."""

from bigmodel.compat.refused import MEGATRON, refused

AbstractTrainStep = refused("AbstractTrainStep", MEGATRON)
BertTrainStep = refused("BertTrainStep", MEGATRON)
GPTTrainStep = refused("GPTTrainStep", MEGATRON)
T5TrainStep = refused("T5TrainStep", MEGATRON)
MegatronEngine = refused("MegatronEngine", MEGATRON)
MegatronLMDummyDataLoader = refused("MegatronLMDummyDataLoader", MEGATRON)
MegatronLMDummyScheduler = refused("MegatronLMDummyScheduler", MEGATRON)
MegatronLMOptimizerWrapper = refused("MegatronLMOptimizerWrapper", MEGATRON)
MegatronLMSchedulerWrapper = refused("MegatronLMSchedulerWrapper", MEGATRON)
avg_losses_across_data_parallel_group = refused("avg_losses_across_data_parallel_group", MEGATRON)
finish_mpu_init = refused("finish_mpu_init", MEGATRON)
gather_across_data_parallel_groups = refused("gather_across_data_parallel_groups", MEGATRON)
model_provider_func = refused("model_provider_func", MEGATRON)
initialize = megatron_lm_initialize = refused("initialize", MEGATRON)
prepare_data_loader = megatron_lm_prepare_data_loader = refused("prepare_data_loader", MEGATRON)
prepare_optimizer = megatron_lm_prepare_optimizer = refused("prepare_optimizer", MEGATRON)
prepare_scheduler = megatron_lm_prepare_scheduler = refused("prepare_scheduler", MEGATRON)
prepare_model_optimizer_scheduler = refused("prepare_model_optimizer_scheduler", MEGATRON)
megatron_lm_prepare_model_optimizer_scheduler = prepare_model_optimizer_scheduler
