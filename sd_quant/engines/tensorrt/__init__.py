"""TensorRT, in files that follow the way of a plan:

- ``profile`` chooses the shapes that a plan takes;
- ``build`` builds a plan from an ONNX file;
- ``plan`` reads what the header of a plan and the record of its build say;
- ``run`` checks a plan, loads it and calls it;
- ``inspect`` says in which numbers a loaded plan multiplies;
- ``library`` imports the Python module that build and run call.

One implementation serves two Python modules with the same API: ``tensorrt`` builds on and for the GPU of this machine;
``tensorrt_rtx`` (TensorRT for RTX) also builds ahead of time for named targets on a machine without a GPU. Networks are
strongly typed: precision comes from the ONNX file alone, and there are no precision flags to forget.

Deserializing a plan runs its native code, and the runtime's own validity check is no security boundary. So the build
leaves a record beside the plan, and a plan is handed to the runtime only if its bytes in memory have the SHA-256 of
that record. It guards against a damaged, stale or swapped file, not against someone who can write both files.

Activations lie in torch's memory and are allocated for each call, so engines that run one after the other share that
memory, among themselves and with torch.

Roads not taken: VERSION_COMPATIBLE plans, which run on other versions but slower on all; and trtexec, whose errors
cannot be caught.
"""
