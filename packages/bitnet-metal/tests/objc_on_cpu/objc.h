// The Objective-C runtime calls that the binding uses, and objects whose counts are checked. No GPU takes part.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

static const char *const OS = "15.0", *const BUILD = "24A335";  // the system, where METAL_TEST_OS and _BUILD name no other

#define EXPORT extern "C" __attribute__((visibility("default")))

// An object. It is never given back to the heap, so that a message to one that is gone is found.
struct Object {
    const char *kind;  // its class
    long count = 1;    // owners; 0 once it is gone
    bool immortal = false;
    explicit Object(const char *name);
    virtual ~Object() = default;
    virtual void gone() {}  // releases what it owns
};

typedef void (*Method)();
// Makes `selector` of objects of `kind` call a function of (receiver, selector, arguments ...).
struct Add {
    Add(const char *kind, const char *selector, Method method);
};
#define METHOD(kind, selector, result, name, ...) \
    static result name(__VA_ARGS__); \
    static Add add_##name(kind, selector, (Method)name); \
    static result name(__VA_ARGS__)

// Notes what a caller did wrong; `test_problems` has it all.
void wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
Object *autoreleased(Object *object);
void retain(Object *object);
void release(Object *object);
Object *string(const std::string &text);
const std::string &text_of(Object *string);
Object *error(long code, const std::string &text);
// An environment variable's number, and its text.
long long setting(const char *name, long long otherwise);
std::string setting_text(const char *name, const char *otherwise);
