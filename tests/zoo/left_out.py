"""Why other classes of diffusers for images or video have no tiny pipeline. A name without "Pipeline" is that class."""

REASONS = {
    "deprecated": """
        AltDiffusion AltDiffusionImg2Img BlipDiffusion BlipDiffusionControlNet CycleDiffusion PIA PaintByExample RePaint
        StableDiffusionControlNetXS StableDiffusionDiffEdit StableDiffusionGLIGEN StableDiffusionGLIGENTextImage
        StableDiffusionInpaintPipelineLegacy StableDiffusionLDM3D StableDiffusionModelEditing StableDiffusionPanorama
        StableDiffusionParadigms StableDiffusionPix2PixZero StableDiffusionXLControlNetXS UnCLIP UnCLIPImageVariation
        UniDiffuser VQDiffusion VersatileDiffusionDualGuided VersatileDiffusionImageVariation
        VersatileDiffusionTextToImage VideoToVideoSD WuerstchenCombined
    """,
    "deprecated, and sets attention processors of Stable Diffusion's network in each run": """
        TextToVideoZero TextToVideoZeroSDXL
    """,
    "another kind of guidance around the networks of a pipeline that is built": """
        AnimateDiffPAG HunyuanDiTPAG KolorsPAG PixArtSigmaPAG SanaPAG SemanticStableDiffusion StableDiffusion3PAG
        StableDiffusion3PAGImg2Img StableDiffusionAttendAndExcite StableDiffusionControlNetPAG
        StableDiffusionControlNetPAGInpaint StableDiffusionPAG StableDiffusionPAGImg2Img StableDiffusionPAGInpaint
        StableDiffusionPipelineSafe StableDiffusionSAG StableDiffusionXLControlNetPAG
        StableDiffusionXLControlNetPAGImg2Img StableDiffusionXLPAG StableDiffusionXLPAGImg2Img
        StableDiffusionXLPAGInpaint
    """,
    "runs graphs of ONNX, has no networks of PyTorch": """
        OnnxStableDiffusion OnnxStableDiffusionImg2Img OnnxStableDiffusionInpaint OnnxStableDiffusionUpscale
        StableDiffusionOnnx
    """,
    "one of two stages: makes embeddings, takes them, or refines what another class made": """
        FluxPriorRedux HunyuanImageRefiner IFImg2ImgSuperResolution IFInpaintingSuperResolution IFSuperResolution
        Kandinsky6SR KandinskyImg2Img KandinskyInpaint KandinskyPrior KandinskyV22ControlnetImg2Img
        KandinskyV22Img2Img KandinskyV22Inpaint KandinskyV22Prior KandinskyV22PriorEmb2Emb LDMSuperResolution
        LTX2LatentUpsample LTXLatentUpsample SanaWMLTX2Refiner StableCascadePrior WuerstchenPrior
    """,
    "several stages, each with a denoiser of its own": """
        KandinskyImg2ImgCombined KandinskyInpaintCombined StableCascadeCombined StableUnCLIP StableUnCLIPImg2Img
        VisualCloze VisualClozeGeneration
    """,
    "a version or an ancestor of a pipeline that is built": "KandinskyCombined LDMTextToImage",
    "makes text, sound, depth, normals or a shape": """
        DiffusionGemma LLaDA2 MarigoldDepth MarigoldIntrinsics MarigoldNormals ShapEImg2Img StableAudio3
    """,
    "makes sound with the video": """
        Kandinsky6TI2VA LTX2 LTX2Condition LTX2DFR LTX2DFRTemporalRefine LTX2HDR LTX2ImageToVideo LTX2InContext
    """,
    "its check of prompts and frames cannot be left away and needs the package cosmos_guardrail": """
        Cosmos2TextToImage Cosmos2VideoToWorld Cosmos2_5_PredictBase CosmosTextToWorld CosmosVideoToWorld
    """,
    "works at about a million pixels, whatever size is asked for": """
        Kandinsky5I2I LongCatImageEdit QwenImageEditInpaint QwenImageLayered
    """,
    "a true processor of Qwen3-VL, which needs torchvision": "JoyImageEdit JoyImageEditPlus QwenImage21",
    "its call fails or swaps sides in diffusers 0.42": """
        ChromaInpaint KandinskyV22Img2ImgCombined KandinskyV22InpaintCombined
    """,
    "its control network shares modules with the denoiser, so no folder of the whole can be opened": """
        ZImageControlNet ZImageControlNetInpaint
    """,
    "its control network is 320 wide whatever its configuration says": """
        StableDiffusionXLControlNetUnion StableDiffusionXLControlNetUnionImg2Img
        StableDiffusionXLControlNetUnionInpaint
    """,
    "its prompt is a document of its own: JSON, or segments": "BriaFiboEdit LTXI2VLongMultiPrompt",
    "a network beside it, of depth, poses or images, that no other class has": """
        HunyuanVideoFramepack HunyuanVideoImageToVideo SanaWM StableDiffusionDepth2Img WanAnimate ZImageOmni
    """,
    "the networks of a class that is built, with the video or the control network of another": """
        AnimateDiffControlNet AnimateDiffSparseControlNet AnimateDiffVideoToVideoControlNet Cosmos2_5_Transfer
        EasyAnimateControl EasyAnimateInpaint LucyEdit
    """,
}
WHOLE_NAMES = ("SanaWMLTX2Refiner", "StableDiffusionInpaintPipelineLegacy", "StableDiffusionPipelineSafe")
LEFT_OUT: dict[str, str] = {
    name if name in WHOLE_NAMES else f"{name}Pipeline": reason
    for reason, names in REASONS.items()
    for name in names.split()
}
