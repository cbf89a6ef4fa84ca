"""Messages as Apple declares them: where, and the types. ``test_objc.py`` compares ``objc.py`` with it.

A source such as ``Metal/MTLDevice`` is the header of that name of metal-cpp, Apple's own C++ interface to Metal (its
release for macOS 14.2, github.com/bkaradzic/metal-cpp): its selectors, results and arguments were compared with this
table by a script on 2026-11-23, and its enumerations and their values read. What metal-cpp lacks is a page under
developer.apple.com/documentation. Those were read on that day but for three, which have other witnesses:
``stringWithUTF8String:`` (clang's NSAPI.cpp has it), ``setSelector:`` (the property ``selector``, which the page of
``invokeWithTarget:`` declares) and ``makeObjectsPerformSelector:withObject:`` (pub.dev's objective_c has it).
"""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """A selector's source, and the types of its result and its arguments."""

    source: str
    result: str
    arguments: tuple[str, ...] = ()


SELECTORS = {
    "alloc": Message("Foundation/NSObject", "id"),
    "init": Message("Foundation/NSObject", "id"),
    "retain": Message("Foundation/NSObject", "id"),
    "release": Message("Foundation/NSObject", "void"),
    "stringWithUTF8String:": Message("foundation/nsstring/stringwithutf8string:", "id", ("const char *",)),
    "UTF8String": Message("Foundation/NSString", "const char *"),
    "processInfo": Message("Foundation/NSProcessInfo", "id"),
    "operatingSystemVersionString": Message("Foundation/NSProcessInfo", "id"),
    "count": Message("Foundation/NSArray", "NSUInteger"),
    "objectAtIndex:": Message("Foundation/NSArray", "id", ("NSUInteger",)),
    "localizedDescription": Message("Foundation/NSError", "id"),
    "code": Message("Foundation/NSError", "NSInteger"),
    "name": Message("Metal/MTLDevice", "id"),
    "registryID": Message("Metal/MTLDevice", "uint64_t"),
    "supportsFamily:": Message("Metal/MTLDevice", "BOOL", ("MTLGPUFamily",)),
    "recommendedMaxWorkingSetSize": Message("Metal/MTLDevice", "uint64_t"),
    "currentAllocatedSize": Message("Metal/MTLDevice", "NSUInteger"),
    "maxBufferLength": Message("Metal/MTLDevice", "NSUInteger"),
    "maxThreadgroupMemoryLength": Message("Metal/MTLDevice", "NSUInteger"),
    "newCommandQueue": Message("Metal/MTLDevice", "id"),
    "newBufferWithLength:options:": Message("Metal/MTLDevice", "id", ("NSUInteger", "MTLResourceOptions")),
    "newBufferWithBytesNoCopy:length:options:deallocator:": Message(
        "Metal/MTLDevice", "id", ("void *", "NSUInteger", "MTLResourceOptions", "block")
    ),
    "newLibraryWithSource:options:error:": Message("Metal/MTLDevice", "id", ("id", "id", "NSError **")),
    "newFunctionWithName:": Message("Metal/MTLLibrary", "id", ("id",)),
    "newComputePipelineStateWithDescriptor:options:reflection:error:": Message(
        "Metal/MTLDevice", "id", ("id", "MTLPipelineOption", "id *", "NSError **")
    ),
    "setComputeFunction:": Message("Metal/MTLComputePipeline", "void", ("id",)),
    "setSupportIndirectCommandBuffers:": Message("Metal/MTLComputePipeline", "void", ("BOOL",)),
    "setBinaryArchives:": Message("Metal/MTLComputePipeline", "void", ("id",)),
    "fileURLWithPath:": Message("Foundation/NSURL", "id", ("id",)),
    "setUrl:": Message("Metal/MTLBinaryArchive", "void", ("id",)),
    "newBinaryArchiveWithDescriptor:error:": Message("Metal/MTLDevice", "id", ("id", "NSError **")),
    "addComputePipelineFunctionsWithDescriptor:error:": Message("Metal/MTLBinaryArchive", "BOOL", ("id", "NSError **")),
    "serializeToURL:error:": Message("Metal/MTLBinaryArchive", "BOOL", ("id", "NSError **")),
    "newResidencySetWithDescriptor:error:": Message(
        "metal/mtldevice/makeresidencyset(descriptor:)", "id", ("id", "NSError **")
    ),
    "addResidencySet:": Message("metal/mtlcommandqueue/addresidencyset(_:)", "void", ("id",)),
    "addAllocation:": Message("metal/mtlresidencyset/addallocation(_:)", "void", ("id",)),
    "removeAllocation:": Message("metal/mtlresidencyset/removeallocation(_:)", "void", ("id",)),
    "requestResidency": Message("metal/mtlresidencyset/requestresidency()", "void"),
    "setFastMathEnabled:": Message("Metal/MTLLibrary", "void", ("BOOL",)),
    "setLanguageVersion:": Message("Metal/MTLLibrary", "void", ("MTLLanguageVersion",)),
    "maxTotalThreadsPerThreadgroup": Message("Metal/MTLComputePipeline", "NSUInteger"),
    "threadExecutionWidth": Message("Metal/MTLComputePipeline", "NSUInteger"),
    "contents": Message("Metal/MTLBuffer", "void *"),
    "commandBuffer": Message("Metal/MTLCommandQueue", "id"),
    "computeCommandEncoder": Message("Metal/MTLCommandBuffer", "id"),
    "setComputePipelineState:": Message("Metal/MTLComputeCommandEncoder", "void", ("id",)),
    "setBuffers:offsets:withRange:": Message(
        "Metal/MTLComputeCommandEncoder", "void", ("const id *", "const NSUInteger *", "NSRange")
    ),
    "dispatchThreadgroups:threadsPerThreadgroup:": Message(
        "Metal/MTLComputeCommandEncoder", "void", ("MTLSize", "MTLSize")
    ),
    "useResources:count:usage:": Message(
        "Metal/MTLComputeCommandEncoder", "void", ("const id *", "NSUInteger", "MTLResourceUsage")
    ),
    "executeCommandsInBuffer:withRange:": Message("Metal/MTLComputeCommandEncoder", "void", ("id", "NSRange")),
    "endEncoding": Message("Metal/MTLCommandEncoder", "void"),
    "commit": Message("Metal/MTLCommandBuffer", "void"),
    "waitUntilCompleted": Message("Metal/MTLCommandBuffer", "void"),
    "status": Message("Metal/MTLCommandBuffer", "MTLCommandBufferStatus"),
    "error": Message("Metal/MTLCommandBuffer", "id"),
    "newIndirectCommandBufferWithDescriptor:maxCommandCount:options:": Message(
        "Metal/MTLDevice", "id", ("id", "NSUInteger", "MTLResourceOptions")
    ),
    "setCommandTypes:": Message("Metal/MTLIndirectCommandBuffer", "void", ("MTLIndirectCommandType",)),
    "setInheritBuffers:": Message("Metal/MTLIndirectCommandBuffer", "void", ("BOOL",)),
    "setInheritPipelineState:": Message("Metal/MTLIndirectCommandBuffer", "void", ("BOOL",)),
    "setMaxKernelBufferBindCount:": Message("Metal/MTLIndirectCommandBuffer", "void", ("NSUInteger",)),
    "indirectComputeCommandAtIndex:": Message("Metal/MTLIndirectCommandBuffer", "id", ("NSUInteger",)),
    "setKernelBuffer:offset:atIndex:": Message(
        "Metal/MTLIndirectCommandEncoder", "void", ("id", "NSUInteger", "NSUInteger")
    ),
    "concurrentDispatchThreadgroups:threadsPerThreadgroup:": Message(
        "Metal/MTLIndirectCommandEncoder", "void", ("MTLSize", "MTLSize")
    ),
    "setBarrier": Message("Metal/MTLIndirectCommandEncoder", "void"),
    "signatureWithObjCTypes:": Message("foundation/nsmethodsignature/signaturewithobjctypes:", "id", ("const char *",)),
    "invocationWithMethodSignature:": Message("foundation/nsinvocation/invocationwithmethodsignature:", "id", ("id",)),
    "setSelector:": Message("foundation/nsinvocation/selector", "void", ("SEL",)),
    "setArgument:atIndex:": Message("foundation/nsinvocation/setargument:atindex:", "void", ("void *", "NSInteger")),
    "invokeWithTarget:": Message("foundation/nsinvocation/invokewithtarget:", "void", ("id",)),
    "initWithObjects:count:": Message("Foundation/NSArray", "id", ("const id *", "NSUInteger")),
    "makeObjectsPerformSelector:withObject:": Message(
        "foundation/nsarray/makeobjectsperformselector:withobject:", "void", ("SEL", "id")
    ),
}
ENUMS = {
    "MTLGPUFamily": "NSInteger",
    "MTLResourceOptions": "NSUInteger",
    "MTLLanguageVersion": "NSUInteger",
    "MTLCommandBufferStatus": "NSUInteger",
    "MTLPipelineOption": "NSUInteger",
    "MTLResourceUsage": "NSUInteger",
    "MTLIndirectCommandType": "NSUInteger",
}
"""Apple's enumerations, declared by NS_ENUM and NS_OPTIONS, and the integers that they are."""
STRUCTURES = {"MTLSize": (("width", "height", "depth"), 24), "NSRange": (("location", "length"), 16)}
"""Structures that are passed by value: their fields, all of them NSUInteger, and their bytes (metal/mtlsize,
foundation/nsrange)."""
CONSTANTS = {
    "MTLLanguageVersion2_4": 131076,
    "MTLGPUFamilyApple7": 1007,
    "MTLGPUFamilyApple9": 1009,
    "MTLIndirectCommandTypeConcurrentDispatch": 32,
    "MTLPipelineOptionFailOnBinaryArchiveMiss": 4,
    "MTLResourceUsageRead": 1,
    "MTLResourceUsageWrite": 2,
    "MTLCommandBufferStatusCompleted": 4,
    "MTLCommandBufferStatusError": 5,
    "MTLCommandBufferErrorInternal": 1,
    "MTLCommandBufferErrorTimeout": 2,
    "MTLCommandBufferErrorPageFault": 3,
    "MTLCommandBufferErrorAccessRevoked": 4,
    "MTLCommandBufferErrorNotPermitted": 7,
    "MTLCommandBufferErrorOutOfMemory": 8,
    "MTLCommandBufferErrorInvalidResource": 9,
    "MTLCommandBufferErrorMemoryless": 10,
    "MTLCommandBufferErrorDeviceRemoved": 11,
    "MTLCommandBufferErrorStackOverflow": 12,
}
"""Values of metal-cpp's enumerations of these names."""
ENCODINGS = {
    "void": "v",
    "id": "@",
    "const id *": "^@",
    "const NSUInteger *": "^Q",
    "NSRange": "{_NSRange=QQ}",
    "MTLSize": "{?=QQQ}",
}
"""Types as ``@encode`` writes them (Objective-C Runtime Programming Guide, Type Encodings): a structure is its name, or
``?`` for one without, and its fields."""
