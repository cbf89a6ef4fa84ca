"""Messages as Apple documents them: the page under developer.apple.com/documentation, and the declaration's types.

``test_objc.py`` compares ``objc.py`` with it. Error codes and ``setBuffers:offsets:withRange:`` were checked against
Apple's headers. The rest was written from memory, the pages' addresses included: check each before relying on it.
"""

from __future__ import annotations

from typing import NamedTuple


class Message(NamedTuple):
    """A selector's page, and the types of its result and its arguments."""

    page: str
    result: str
    arguments: tuple[str, ...] = ()


SELECTORS = {
    "alloc": Message("objectivec/nsobject-swift.class/alloc", "id"),
    "init": Message("objectivec/nsobject-swift.class/init()", "id"),
    "retain": Message("objectivec/nsobjectprotocol/retain", "id"),
    "release": Message("objectivec/nsobjectprotocol/release", "void"),
    "stringWithUTF8String:": Message("foundation/nsstring/1497379-stringwithutf8string", "id", ("const char *",)),
    "UTF8String": Message("foundation/nsstring/utf8string", "const char *"),
    "processInfo": Message("foundation/processinfo/processinfo", "id"),
    "operatingSystemVersionString": Message("foundation/processinfo/operatingsystemversionstring", "id"),
    "count": Message("foundation/nsarray/count", "NSUInteger"),
    "objectAtIndex:": Message("foundation/nsarray/object(at:)", "id", ("NSUInteger",)),
    "localizedDescription": Message("foundation/nserror/localizeddescription", "id"),
    "code": Message("foundation/nserror/code", "NSInteger"),
    "name": Message("metal/mtldevice/name", "id"),
    "registryID": Message("metal/mtldevice/registryid", "uint64_t"),
    "supportsFamily:": Message("metal/mtldevice/supportsfamily(_:)", "BOOL", ("MTLGPUFamily",)),
    "recommendedMaxWorkingSetSize": Message("metal/mtldevice/recommendedmaxworkingsetsize", "uint64_t"),
    "currentAllocatedSize": Message("metal/mtldevice/currentallocatedsize", "NSUInteger"),
    "maxBufferLength": Message("metal/mtldevice/maxbufferlength", "NSUInteger"),
    "maxThreadgroupMemoryLength": Message("metal/mtldevice/maxthreadgroupmemorylength", "NSUInteger"),
    "newCommandQueue": Message("metal/mtldevice/makecommandqueue()", "id"),
    "newBufferWithLength:options:": Message(
        "metal/mtldevice/makebuffer(length:options:)", "id", ("NSUInteger", "MTLResourceOptions")
    ),
    "newLibraryWithSource:options:error:": Message(
        "metal/mtldevice/makelibrary(source:options:)", "id", ("id", "id", "NSError **")
    ),
    "newFunctionWithName:": Message("metal/mtllibrary/makefunction(name:)", "id", ("id",)),
    "newComputePipelineStateWithFunction:error:": Message(
        "metal/mtldevice/makecomputepipelinestate(function:)", "id", ("id", "NSError **")
    ),
    "setFastMathEnabled:": Message("metal/mtlcompileoptions/fastmathenabled", "void", ("BOOL",)),
    "setLanguageVersion:": Message("metal/mtlcompileoptions/languageversion", "void", ("MTLLanguageVersion",)),
    "maxTotalThreadsPerThreadgroup": Message(
        "metal/mtlcomputepipelinestate/maxtotalthreadsperthreadgroup", "NSUInteger"
    ),
    "threadExecutionWidth": Message("metal/mtlcomputepipelinestate/threadexecutionwidth", "NSUInteger"),
    "contents": Message("metal/mtlbuffer/contents()", "void *"),
    "commandBuffer": Message("metal/mtlcommandqueue/makecommandbuffer()", "id"),
    "computeCommandEncoder": Message("metal/mtlcommandbuffer/makecomputecommandencoder()", "id"),
    "setComputePipelineState:": Message("metal/mtlcomputecommandencoder/setcomputepipelinestate(_:)", "void", ("id",)),
    "setBuffers:offsets:withRange:": Message(
        "metal/mtlcomputecommandencoder/setbuffers:offsets:withrange:",
        "void",
        ("const id *", "const NSUInteger *", "NSRange"),
    ),
    "dispatchThreadgroups:threadsPerThreadgroup:": Message(
        "metal/mtlcomputecommandencoder/dispatchthreadgroups(_:threadsperthreadgroup:)",
        "void",
        ("MTLSize", "MTLSize"),
    ),
    "endEncoding": Message("metal/mtlcommandencoder/endencoding()", "void"),
    "commit": Message("metal/mtlcommandbuffer/commit()", "void"),
    "waitUntilCompleted": Message("metal/mtlcommandbuffer/waituntilcompleted()", "void"),
    "status": Message("metal/mtlcommandbuffer/status", "MTLCommandBufferStatus"),
    "error": Message("metal/mtlcommandbuffer/error", "id"),
}
ENUMS = {
    "MTLGPUFamily": "NSInteger",
    "MTLResourceOptions": "NSUInteger",
    "MTLLanguageVersion": "NSUInteger",
    "MTLCommandBufferStatus": "NSUInteger",
}
"""Apple's enumerations, declared by NS_ENUM and NS_OPTIONS, and the integers that they are."""
STRUCTURES = {"MTLSize": (("width", "height", "depth"), 24), "NSRange": (("location", "length"), 16)}
"""Structures that are passed by value: their fields, all of them NSUInteger, and their bytes (metal/mtlsize,
foundation/nsrange)."""
CONSTANTS = {
    "MTLLanguageVersion2_4": 131076,
    "MTLGPUFamilyApple7": 1007,
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
"""Values of metal/mtllanguageversion, metal/mtlgpufamily, metal/mtlcommandbufferstatus, metal/mtlcommandbuffererror."""
