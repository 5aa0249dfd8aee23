"""TensorRT: ``build`` builds a plan, ``plan`` reads its header and record, ``run`` checks, loads and calls it.

One implementation serves two Python modules with the same API: ``tensorrt`` builds on and for the GPU of this machine;
``tensorrt_rtx`` (TensorRT for RTX) also ahead of time for named targets on a machine without a GPU. Networks are
strongly typed: precision comes from the ONNX file alone.

Deserializing a plan runs its native code, and the runtime's own validity check is no security boundary. So a plan is
passed to the runtime only if its SHA-256 is that in the record (``<plan>.json``), which the build wrote. This protects
against a damaged, stale or swapped file, not against someone who can write both files.

Alternatives not taken: VERSION_COMPATIBLE plans, which run on other versions but slower; and trtexec, whose errors
cannot be caught.
"""
