"""TensorRT: build a plan from ONNX (``build``), know what a plan is without running it (``plan``), run it (``run``).

One implementation serves two Python modules with the same API: ``tensorrt`` builds for the GPU it finds, on that GPU;
``tensorrt_rtx`` (TensorRT for RTX) also builds ahead of time for named targets on a machine with no GPU at all.
Networks are strongly typed: precision comes from the ONNX alone, and there are no precision flags to forget.

To deserialize a plan is to run its native code, and the runtime's own validity check is no security boundary. So the
build leaves a record beside the plan, and a plan is handed to the runtime only when the bytes in memory have the
SHA-256 of that record. It guards against a damaged, stale or swapped file, not against someone who can write both.

What a network needs beside its inputs and outputs while it runs is torch's memory, taken for the call: engines that run
one after the other share it, among themselves and with torch.

Roads not taken: VERSION_COMPATIBLE plans, which run on other versions and are slower on all; and trtexec, whose errors
cannot be caught.
"""
