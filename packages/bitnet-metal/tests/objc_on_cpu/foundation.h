// Foundation's classes and the structures that messages pass by value.
#pragma once
#include "objc.h"

typedef uint64_t Size;
struct MTLSize {
    Size width, height, depth;
};
struct NSRange {
    Size location, length;
};
struct Array : Object {
    std::vector<Object *> all;
    Array() : Object("NSArray") {}
    void gone() override {
        for (Object *object : all) release(object);
    }
};
