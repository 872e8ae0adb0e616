// The part of CPython's stable ABI that wire.cpp uses, declared here because Python.h is not installed everywhere.
// Objects are opaque: nothing here depends on how they lie in memory.

#ifndef ABI_H
#define ABI_H

#include <cstddef>
#include <cstdint>

struct PyObject;
struct PyThreadState;
using Py_ssize_t = std::ptrdiff_t;

extern "C" {
struct PyMethodDef {
    const char *name;
    void *function;
    int flags;
    const char *doc;
};
extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_Exception, *PyExc_OSError, *PyExc_ValueError;

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *);
PyObject *PyBool_FromLong(long);
PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
char *PyBytes_AsString(PyObject *);
int PyBytes_AsStringAndSize(PyObject *, char **, Py_ssize_t *);
PyObject *PyCapsule_New(void *, const char *, void (*)(PyObject *));
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
PyObject *PyDict_New(void);
int PyErr_CheckSignals(void);
void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
int PyErr_GivenExceptionMatches(PyObject *, PyObject *);
void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
PyObject *PyErr_Occurred(void);
void PyErr_Restore(PyObject *, PyObject *, PyObject *);
PyObject *PyErr_SetFromErrno(PyObject *);
void PyErr_SetString(PyObject *, const char *);
void PyEval_RestoreThread(PyThreadState *);
PyThreadState *PyEval_SaveThread(void);
double PyFloat_AsDouble(PyObject *);
PyObject *PyFloat_FromDouble(double);
int PyList_Append(PyObject *, PyObject *);
PyObject *PyList_New(Py_ssize_t);
long PyLong_AsLong(PyObject *);
PyObject *PyLong_FromLong(long);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
int PyObject_IsTrue(PyObject *);
Py_ssize_t PyObject_Size(PyObject *);
PyObject *PyTuple_New(Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
PyObject *PyUnicode_InternFromString(const char *);
PyObject *PyObject_GetIter(PyObject *);
PyObject *PyIter_Next(PyObject *);
}

constexpr int METH_FASTCALL = 0x80;

inline PyObject *none() { return &_Py_NoneStruct; }
inline PyObject *new_none() {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}
inline void drop(PyObject *&object) {
    if (object != nullptr) {
        PyObject *gone = object;
        object = nullptr;
        Py_DecRef(gone);
    }
}

#endif
