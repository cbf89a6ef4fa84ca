// NSArray, and NSInvocation with the signatures that the binding keeps messages of.
#include "foundation.h"

#include <cstring>

extern "C" Method test_lookup(Object *receiver, const char *selector);

namespace {
struct Signature : Object {
    std::string types;
    explicit Signature(const char *t) : Object("NSMethodSignature"), types(t) {}
};
// The bytes of an argument whose encoding begins at `at`, which moves behind it; 0 for a type that is not known.
size_t argument_bytes(const char *&at) {
    struct {
        const char *encoding;
        size_t bytes;
    } const known[] = {{"@", 8}, {":", 8}, {"^@", 8}, {"^Q", 8}, {"{_NSRange=QQ}", sizeof(NSRange)}, {"{?=QQQ}", sizeof(MTLSize)}};
    for (auto &type : known)
        if (!strncmp(at, type.encoding, strlen(type.encoding))) {
            at += strlen(type.encoding);
            return type.bytes;
        }
    return 0;
}
struct Invocation : Object {
    std::string types;
    const char *selector = nullptr;
    std::vector<std::vector<char>> arguments;  // of the receiver and the selector too, as they are counted
    explicit Invocation(const Signature *signature) : Object("NSInvocation"), types(signature->types) {
        const char *at = types.c_str();
        if (*at++ != 'v') wrong("a kept message that does not return void: %s", types.c_str());
        while (*at) {
            size_t bytes = argument_bytes(at);
            if (!bytes) {
                wrong("a kept message of types that are not known: %s", types.c_str());
                break;
            }
            arguments.emplace_back(bytes, (char)0xFF);
        }
    }
    template <typename T>
    T argument(size_t i) const {
        T value;
        memcpy(&value, arguments.at(i).data(), sizeof value);
        return value;
    }
};
}  // namespace

METHOD("NSArray", "count", Size, array_count, Array *self, const char *) { return self->all.size(); }
METHOD("NSArray", "objectAtIndex:", Object *, array_at, Array *self, const char *, Size i) { return self->all.at(i); }
METHOD("class NSArray", "alloc", Object *, new_array, Object *, const char *) { return new Array; }
METHOD("NSArray", "initWithObjects:count:", Object *, array_init, Array *self, const char *, Object **objects, Size count) {
    for (Size i = 0; i < count; i++) {
        retain(objects[i]);
        self->all.push_back(objects[i]);
    }
    return self;
}
METHOD("NSArray", "makeObjectsPerformSelector:withObject:", void, array_perform, Array *self, const char *, const char *selector, Object *object) {
    for (Object *each : self->all) ((void (*)(Object *, const char *, Object *))test_lookup(each, selector))(each, selector, object);
}

METHOD("class NSMethodSignature", "signatureWithObjCTypes:", Object *, signature_with, Object *, const char *, const char *types) {
    return autoreleased(new Signature(types));
}
METHOD("class NSInvocation", "invocationWithMethodSignature:", Object *, invocation_with, Object *, const char *, Signature *signature) {
    return autoreleased(new Invocation(signature));
}
METHOD("NSInvocation", "setSelector:", void, invocation_selector, Invocation *self, const char *, const char *selector) { self->selector = selector; }
METHOD("NSInvocation", "setArgument:atIndex:", void, invocation_argument, Invocation *self, const char *, const void *value, long i) {
    if (i < 2 || i >= (long)self->arguments.size()) return wrong("argument %ld of a kept message of types %s", i, self->types.c_str());
    memcpy(self->arguments[(size_t)i].data(), value, self->arguments[(size_t)i].size());
}
METHOD("NSInvocation", "invokeWithTarget:", void, invoke, Invocation *self, const char *, Object *target) {
    if (!self->selector) return wrong("a kept message without a selector");
    Method method = test_lookup(target, self->selector);
    if (self->types == "v@:@") {
        ((void (*)(Object *, const char *, Object *))method)(target, self->selector, self->argument<Object *>(2));
    } else if (self->types == "v@:^@^Q{_NSRange=QQ}") {
        auto send = (void (*)(Object *, const char *, Object **, const Size *, NSRange))method;
        send(target, self->selector, self->argument<Object **>(2), self->argument<const Size *>(3), self->argument<NSRange>(4));
    } else if (self->types == "v@:{?=QQQ}{?=QQQ}") {
        auto send = (void (*)(Object *, const char *, MTLSize, MTLSize))method;
        send(target, self->selector, self->argument<MTLSize>(2), self->argument<MTLSize>(3));
    } else {
        wrong("a kept message of types %s, which the test library does not send", self->types.c_str());
    }
}
