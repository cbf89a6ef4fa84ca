#include "objc.h"

#include <cstdlib>
#include <cstring>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace {
std::recursive_mutex lock;
std::map<std::string, std::map<std::string, Method>> &methods() {
    static std::map<std::string, std::map<std::string, Method>> all;
    return all;
}
std::unordered_set<Object *> &objects() {
    static std::unordered_set<Object *> all;
    return all;
}
std::string &problems() {
    static std::string all;
    return all;
}
thread_local std::vector<std::vector<Object *>> pools;

struct String : Object {
    std::string text;
    explicit String(const std::string &t) : Object("NSString"), text(t) {}
};
struct Error : Object {
    long number;
    Object *description;
    Error(long n, const std::string &t) : Object("NSError"), number(n), description(string(t)) {}
    void gone() override { release(description); }
};
struct Class : Object {
    std::string name, meta;
    explicit Class(const std::string &n) : Object(""), name(n), meta("class " + n) {
        kind = meta.c_str();
        immortal = true;
    }
};
uintptr_t nothing() { return 0; }
}  // namespace

Object::Object(const char *name) : kind(name) {
    std::lock_guard<std::recursive_mutex> held(lock);
    objects().insert(this);
}
Add::Add(const char *kind, const char *selector, Method method) { methods()[kind][selector] = method; }

void wrong(const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    std::lock_guard<std::recursive_mutex> held(lock);
    problems() += std::string(text) + "\n";
}

Object *autoreleased(Object *object) {
    if (pools.empty()) wrong("a %s was autoreleased without a pool", object->kind);
    else pools.back().push_back(object);
    return object;
}
void retain(Object *object) {
    std::lock_guard<std::recursive_mutex> held(lock);
    object->count++;
}
void release(Object *object) {
    if (!object || object->immortal) return;
    std::lock_guard<std::recursive_mutex> held(lock);
    if (object->count <= 0) {
        wrong("a %s was released more often than it was owned", object->kind);
    } else if (!--object->count) {
        object->gone();
    }
}
Object *string(const std::string &text) { return new String(text); }
const std::string &text_of(Object *object) { return static_cast<String *>(object)->text; }
Object *error(long code, const std::string &text) { return new Error(code, text); }
long long setting(const char *name, long long otherwise) {
    const char *found = getenv((std::string("METAL_TEST_") + name).c_str());
    return found ? atoll(found) : otherwise;
}
std::string setting_text(const char *name, const char *otherwise) {
    const char *found = getenv((std::string("METAL_TEST_") + name).c_str());
    return found ? found : otherwise;
}

// The method that a message reaches. One that must not be sent is noted, and answers with 0.
extern "C" Method test_lookup(Object *receiver, const char *selector) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (!receiver) {
        wrong("%s was sent to nil", selector);
        return (Method)nothing;
    }
    if (!objects().count(receiver)) {
        wrong("%s was sent to what is no object", selector);
        return (Method)nothing;
    }
    if (receiver->count <= 0) {
        wrong("%s was sent to a %s that is gone", selector, receiver->kind);
        return (Method)nothing;
    }
    struct Hash {
        size_t operator()(const std::pair<const char *, const char *> &p) const { return (size_t)p.first * 31 + (size_t)p.second; }
    };
    static std::unordered_map<std::pair<const char *, const char *>, Method, Hash> known;  // as selectors are interned, like Apple's
    auto before = known.find({receiver->kind, selector});
    if (before != known.end()) return before->second;
    for (const char *kind : {receiver->kind, "any"}) {
        auto found = methods()[kind].find(selector);
        if (found != methods()[kind].end()) return known[{receiver->kind, selector}] = found->second;
    }
    wrong("a %s knows no %s", receiver->kind, selector);
    return (Method)nothing;
}

// Keeps every register that has an argument, and goes on in the method as if that had been called.
#if defined(__x86_64__)
__asm__(R"(
    .text
    .globl objc_msgSend
    .type objc_msgSend, @function
objc_msgSend:
    pushq %rbp
    movq %rsp, %rbp
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %r8
    pushq %r9
    callq test_lookup@PLT
    movq %rax, %r11
    popq %r9
    popq %r8
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    popq %rbp
    jmpq *%r11
)");
#elif defined(__aarch64__)
__asm__(R"(
    .text
    .globl objc_msgSend
    .type objc_msgSend, %function
objc_msgSend:
    stp x29, x30, [sp, #-80]!
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    bl test_lookup
    mov x16, x0
    ldp x6, x7, [sp, #64]
    ldp x4, x5, [sp, #48]
    ldp x2, x3, [sp, #32]
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #80
    br x16
)");
#endif

EXPORT const int bitnet_test_driver = 1;  // by which the backend knows it

EXPORT const char *sel_registerName(const char *name) {
    static std::set<std::string> names;
    std::lock_guard<std::recursive_mutex> held(lock);
    return names.insert(name).first->c_str();
}
EXPORT Object *objc_getClass(const char *name) {
    static std::map<std::string, Object *> classes;
    std::lock_guard<std::recursive_mutex> held(lock);
    if (!methods().count(std::string("class ") + name)) return nullptr;
    if (!strcmp(name, "MTLResidencySetDescriptor") && atof(setting_text("OS", OS).c_str()) < 15) return nullptr;  // it is of macOS 15
    Object *&found = classes[name];
    if (!found) found = new Class(name);
    return found;
}
EXPORT void *objc_autoreleasePoolPush() {
    pools.emplace_back();
    return (void *)pools.size();
}
EXPORT void objc_autoreleasePoolPop(void *pool) {
    if (pools.size() != (size_t)pool) return wrong("pools do not end in the order in which they began");
    std::vector<Object *> all = std::move(pools.back());
    pools.pop_back();
    for (Object *object : all) release(object);
}

// What went wrong, a line each, with the objects that are still owned. The text lives until the next call.
EXPORT const char *test_problems() {
    static std::string text;
    std::lock_guard<std::recursive_mutex> held(lock);
    text = problems();
    std::map<std::string, int> left;
    for (Object *object : objects())
        if (!object->immortal && object->count > 0) left[object->kind]++;
    for (auto &kind : left) text += "never released: " + std::to_string(kind.second) + " " + kind.first + "\n";
    return text.c_str();
}

METHOD("any", "retain", Object *, any_retain, Object *self, const char *) {
    retain(self);
    return self;
}
METHOD("any", "release", void, any_release, Object *self, const char *) { release(self); }
METHOD("any", "init", Object *, any_init, Object *self, const char *) { return self; }
METHOD("class NSString", "stringWithUTF8String:", Object *, string_with, Object *, const char *, const char *text) {
    return autoreleased(string(text));
}
METHOD("NSString", "UTF8String", const char *, utf8, Object *self, const char *) { return text_of(self).c_str(); }
METHOD("NSError", "code", long, error_code, Object *self, const char *) { return static_cast<Error *>(self)->number; }
METHOD("NSError", "localizedDescription", Object *, error_text, Object *self, const char *) { return static_cast<Error *>(self)->description; }
METHOD("class NSProcessInfo", "processInfo", Object *, process_info, Object *, const char *) {
    static Object *one = new Object("NSProcessInfo");
    one->immortal = true;
    return one;
}
METHOD("NSProcessInfo", "operatingSystemVersionString", Object *, os_version, Object *, const char *) {
    return autoreleased(string("Version " + setting_text("OS", OS) + " (Build " + setting_text("BUILD", BUILD) + ")"));
}
