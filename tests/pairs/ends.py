"""Every knob of ``quantize.py`` with the ends of its range, or with all that it may be where that is a list.

Where a range has no end, or one that depends on the model, a number stands here that is far beyond what anybody means
and that this model still takes in a test's time.
``test_pairs`` holds that no knob is missing.
"""

LONG = "x" * 300
SWITCHES = (
    *("memory_of_parts", "quantize.shift", "quantize.per_token", "quantize.per_channel"),
    *("quantize.shared_branch", "quantize.scale_search", "trt.static_batch", "infer.allow_untrusted_plan"),
)
ENDS: dict[str, list[str]] = dict.fromkeys(SWITCHES, ["false", "true"]) | {  # first what goes with most others
    "quantize": [
        *("int8", "fp8", "int8_dynamic", "nemo", "int8_per_tensor", "int8_weight_only", "int4_w4a4", "mxfp4", "nvfp4"),
        *("fp8_per_block", "fp8_per_row", "mxfp4_weight_only", "mxfp8", "q4_k_weight_only", "q6_k_weight_only"),
        *("rotated_w4a4", "convrot_w4a4", "convrot_w4a8", "svdquant_nvfp4", "svdquant_w4a16", "svdquant_w4a4"),
    ],
    "infer": ["openvino", "onnxruntime", "torch_native"],
    "quant_level": ["3", "1", "2.5", "4"],
    "attention": ["null", "fp8", "int8"],
    "alpha": ["null", "0.0", "1.0", "auto"],
    "smoothing": ["null", "none", "folded", "modelopt"],
    "percentile": ["1.0", "0.5", "0.04"],
    "collect_method": ["null", "mean-max", "min-mean", "default"],
    "keep": ["0", "1", "60", "0.9"],
    "calib_size": ["1", "9"],
    "published": ["null", "examples/published/nemo_docs.yaml"],
    "quantize.exp_name": ["nemo", "''", LONG, "../../../etc/passwd", "'=1+1'"],
    "quantize.exclude": ["{}", "{sd15:['*']}", "{sd15:[]}", "{sdxl:['*']}"],
    "quantize.include": ["{}", "{sdxl:['time_embedding.*']}"],
    "quantize.weights_alone": ["{}", "{sdxl:['*.ff.net.2']}"],
    "quantize.parts": ["null", "{clip1:int8,vae:int8_weight_only}"],
    "quantize.budget": ["null", "0.4", "4000000"],
    "quantize.fit": ["null", "1.052GB"],
    "quantize.resident": ["all", "one"],
    "quantize.choices": ["[int8_weight_only]", "[]", "[int4_w4a4,int8,fp8,mxfp4,mxfp8,nvfp4]"],
    "quantize.n_steps": ["1", "2", "30"],
    "quantize.seed": ["0", "4294967295"],
    "quantize.snapshots": ["[]", "[1,1,1000000]"],
    "quantize.accelerator": ["auto", "cpu"],
    "quantize.devices": ["1", "2"],
    "quantize.batch_size": ["1", "64"],
    "quantize.percentile_calibrator": ["corrected", "modelopt"],
    "quantize.observer": ["min_max", "mse", "by_role"],
    "quantize.rotation": ["0", "4", "256"],
    "quantize.rank": ["0", "1", "64", "0.999", "0.001"],
    "quantize.branch_rounds": ["0", "3"],
    "quantize.rounding": ["nearest", "gptq"],
    "trt.library": ["none", "tensorrt_rtx"],
    "trt.targets": ["null", "[SM89]", "[SM80,SM86,SM89,SM120,SM121]", "[SM120]"],
    "trt.min_batch_size": ["1", "3"],
    "trt.max_batch_size": ["8", "1", "64"],
    "trt.sizes": ["null", "[64x64,128x192]", "[64x192,128x64]"],
    "trt.optimization_level": ["0", "null", "5"],
    "trt.workspace_gib": ["null", "0.5", "1000.0"],
    "trt.timing_cache": ["null", "{folder}/timing"],
    "infer.width": ["64", "128"],
    "infer.height": ["64", "192"],
    "infer.sizes": ["null", "[64x64,128x64]"],
    "model.width": ["64", "128"],
    "model.height": ["64", "128"],
    "model.sizes": ["null", "[64x64,128x64]"],
    "infer.batch_size": ["1", "3", "8"],
    "infer.prompts": ["[a]", "['']", "['a'," + ",".join(["b c"] * 3) + "]", f"['{LONG}{LONG}']"],
    "infer.negative_prompt": ["null", "''", "[a]", f"{LONG}"],
    "infer.num_samples": ["1", "3"],
    "infer.steps": ["1", "2", "30"],
    "infer.scale": ["5.0", "0.0", "1.0", "1000000.0"],
    "infer.seed": ["0", "4294967295"],
    "infer.vae_tile": ["null", "32"],
    "infer.num_warmup_runs": ["0", "3"],
    "infer.num_timed_runs": ["1", "7"],
    "infer.precision": ["auto", "fp32", "fp16", "bf16"],
    "timing.half_width": ["0.02", "0.0001", "0.999"],
    "timing.budget_s": ["0.0", "1.0"],
    "verdict.enough_db": ["40.0", "0.0001", "1000000.0"],
    "verdict.time_of_a_db": ["0.03", "0.0001", "0.999"],
    "verdict.confidence": ["0.95", "0.5", "0.999999"],
    "verdict.floor_db": ["28.0", "null", "1000000.0"],
    "verdict.worst_db": ["20.0", "null", "0.0001"],
    "verdict.speedup": ["null", "1.0001"],
    "cache.dir": ["{folder}/cache", "null"],
    "cache.limit_gb": ["50.0", "0.0"],
    "trackers": ["[]", "[tensorboard]", "[tensorboard,tensorboard]"],
    "export.dtype": ["null", "bf16", "stored", "{clip1:fp32,vae:bf16}"],
    "hand_over": ["[]", "[openvino]", "[onnx,onnx]"],
}
DEPENDING = (  # knobs whose values a job may refuse when it knows the layers; a row has one of them at most
    *("keep", "quantize.exclude", "quantize.budget", "quantize.choices", "quantize.rank"),
    *("hand_over", "export.dtype"),
)
ELSEWHERE = {  # knobs that other names above set, that name a file, say what the model is, are of no job or too long
    *("quantize.format", "quantize.enable", "quantize.quant_level", "quantize.attention", "quantize.alpha"),
    *("quantize.keep", "compiled_baseline", "infer.latents", "infer.cuda_graph", "verdict.image_ms"),
    *("infer.num_prompts", "infer.prompts_seed"),  # of a list nothing is drawn
    *("quantize.smoothing", "quantize.percentile", "quantize.collect_method", "quantize.calib_size"),
    *("quantize.calibration", "quantize.assignment", "infer.out_path", "metrics.clip_weights"),
    *("metrics.pickscore_weights", "metrics.hps_weights", "metrics.image_reward_weights", "metrics.dino_weights"),
    *("metrics.fid_references", "metrics.ocr", "model.family", "model.path", "model.parts", "model.io", "model.dtype"),
    *("model.max_sequence_length", "model.calibration_prompts", "model.prompts", "model.recommended", "model.loras"),
    *("model.controlnets", "model.calibration_control", "infer.control"),
    *("model.calibration_image", "model.calibration_mask", "model.encoder", "model.vae", "model.pipeline"),
    *("model.arguments", "model.excluded", "model.denoiser", "model.observed"),  # of pipelines that are observed
    *("model.calibration_table", "infer.table"),
    *("overwrite", "infer.image", "infer.mask", "infer.strength", "infer.engine", "infer.chosen_because"),
    *("infer.reuse", "infer.schedule", "infer.precise_steps"),  # whose values depend on the number of steps
    *("judge.candidates", "judge.confidence", "judge.layers", "judge.runtimes", "judge.trust_runs"),  # of a sweep
}
