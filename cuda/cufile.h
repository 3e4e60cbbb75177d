// The part of NVIDIA's cuFile that direct storage uses, as its reference documents it (GPUDirect Storage, cuFile API):
// its header comes in a package that only its users have, and the library is opened at run time.
#pragma once
#include <sys/types.h>

extern "C" {
typedef void* CUfileHandle_t;
typedef struct CUfileError {
  int err;     // CUfileOpError; 0: none
  int cu_err;  // CUresult
} CUfileError_t;
typedef struct CUfileDescr_t {
  int type;  // 1: a file descriptor of Linux
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops;
} CUfileDescr_t;

CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description);
void cuFileHandleDeregister(CUfileHandle_t handle);
CUfileError_t cuFileBufRegister(const void* base, size_t length, int flags);
CUfileError_t cuFileBufDeregister(const void* base);
// Bytes moved; -1: see errno; below: a CUfileOpError, negated. The address is base + address_offset.
ssize_t cuFileRead(CUfileHandle_t handle, void* base, size_t size, off_t file_offset, off_t address_offset);
ssize_t cuFileWrite(CUfileHandle_t handle, const void* base, size_t size, off_t file_offset, off_t address_offset);
}
