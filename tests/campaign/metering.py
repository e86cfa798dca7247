"""Memory as the allocator tells it, without any code of elbowroom's.

On CUDA the allocator keeps figures. PyTorch's CPU allocator keeps none and reports to profilers only, which elbowroom
uses itself and which must not be running while it watches its own steps. So the campaign listens one level below:
where the allocator, which lies in libc10, asks the C library for memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

TOOK_MORE = re.compile(r"elbowroom: .* more than its budget", re.S)  # said of the step that has just ended

# Takes the place of `posix_memalign` and `free` in libc10's table of foreign functions. Counts what was allocated
# since `meter_begin`; what is older is not counted when it is freed.
COUNTING = r"""
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PLACES (1 << 20)
static struct { void *address; size_t size; long block; } known[PLACES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long block, ignored;
static long long held, peak, held_of_others, peak_of_others;

static size_t home(void *address) { return ((uintptr_t)address >> 6) * 0x9E3779B97F4A7C15u >> 44; }

static int counting_allocate(void **address, size_t alignment, size_t size) {
    int status = posix_memalign(address, alignment, size);
    if (status) return status;
    pthread_mutex_lock(&lock);
    size_t at = home(*address);
    while (known[at].address) at = (at + 1) % PLACES;
    known[at].address = *address, known[at].size = size, known[at].block = block;
    held += size;
    if (held > peak) peak = held;
    if (size != ignored) held_of_others += size;
    if (held_of_others > peak_of_others) peak_of_others = held_of_others;
    pthread_mutex_unlock(&lock);
    return 0;
}

static void counting_free(void *address) {
    pthread_mutex_lock(&lock);
    size_t at = home(address);
    while (known[at].address && known[at].address != address) at = (at + 1) % PLACES;
    if (address && known[at].address) {
        if (known[at].block == block) {
            held -= known[at].size;
            if (known[at].size != ignored) held_of_others -= known[at].size;
        }
        size_t empty = at;
        for (;;) {  /* whoever was pushed past this place may move up to it */
            at = (at + 1) % PLACES;
            if (!known[at].address) break;
            size_t wanted = home(known[at].address);
            if (((at - wanted) & (PLACES - 1)) >= ((at - empty) & (PLACES - 1))) known[empty] = known[at], empty = at;
        }
        known[empty].address = 0;
    }
    pthread_mutex_unlock(&lock);
    free(address);
}

static void exchange(ElfW(Addr) base, ElfW(Rela) *entries, size_t bytes, ElfW(Sym) *symbols, char *names) {
    for (size_t i = 0; i < bytes / sizeof *entries; i++) {
        char *name = names + symbols[ELF64_R_SYM(entries[i].r_info)].st_name;
        void *mine = !strcmp(name, "posix_memalign") ? (void *)counting_allocate
                   : !strcmp(name, "free") ? (void *)counting_free : 0;
        if (!mine) continue;
        void **place = (void **)(base + entries[i].r_offset);
        uintptr_t page = (uintptr_t)place & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
        mprotect((void *)page, sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE);
        *place = mine;
    }
}

static int visit(struct dl_phdr_info *info, size_t size, void *found) {
    if (!strstr(info->dlpi_name, "libc10.so")) return 0;
    ElfW(Dyn) *entry = 0;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC) entry = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    ElfW(Rela) *plain = 0, *lazy = 0;
    ElfW(Sym) *symbols = 0;
    char *names = 0;
    size_t plain_bytes = 0, lazy_bytes = 0;
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_RELA) plain = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_RELASZ) plain_bytes = entry->d_un.d_val;
        if (entry->d_tag == DT_JMPREL) lazy = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_PLTRELSZ) lazy_bytes = entry->d_un.d_val;
        if (entry->d_tag == DT_SYMTAB) symbols = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_STRTAB) names = (void *)entry->d_un.d_ptr;
    }
    exchange(info->dlpi_addr, plain, plain_bytes, symbols, names);
    exchange(info->dlpi_addr, lazy, lazy_bytes, symbols, names);
    *(int *)found = 1;
    return 1;
}

int meter_install(void) { int found = 0; dl_iterate_phdr(visit, &found); return found; }

void meter_begin(long size) {
    pthread_mutex_lock(&lock);
    block++, ignored = size, held = peak = held_of_others = peak_of_others = 0;
    pthread_mutex_unlock(&lock);
}

long long meter_peak(void) { return peak; }
long long meter_peak_of_others(void) { return peak_of_others; }
long long meter_held(void) { return held; }
"""


@functools.cache
def counting() -> Any:
    """The functions above, in this process, in force from now on."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "counting.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(made), "-x", "c", "-", "-lpthread"]
        subprocess.run(command, input=COUNTING.encode(), check=True)
        library = ctypes.CDLL(str(made))
    library.meter_begin.argtypes = [ctypes.c_long]
    for told in (library.meter_peak, library.meter_peak_of_others, library.meter_held):
        told.restype = ctypes.c_longlong
    if not library.meter_install():
        raise RuntimeError("PyTorch's allocator was not found: there is no libc10 in this process")
    return library


class Meter:
    """Inside the block, bytes above what was allocated when it began: `peak_bytes`, and `end_bytes` when it ended.

    If PyTorch traced something in the block, copies of a generator's state on the host do not count in the peak: it
    puts some aside while it traces, of 5,056 bytes each, whoever asks it to trace.
    """

    def __init__(self, device: str) -> None:
        self.on_cuda = torch.device(device).type == "cuda"
        self.peak_bytes = self.end_bytes = 0

    def __enter__(self) -> Meter:
        gc.freeze()  # so that collecting garbage here looks at nothing that is older than the block
        if self.on_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.began = torch.cuda.memory_allocated()
        else:
            self.traced_before = _frames_traced()
            counting().meter_begin(torch.default_generator.get_state().nbytes)
        return self

    def __exit__(self, *failure: object) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated() - self.began
            self.end_bytes = torch.cuda.memory_allocated() - self.began
        else:
            traced = _frames_traced() != self.traced_before
            self.peak_bytes = counting().meter_peak_of_others() if traced else counting().meter_peak()
            self.end_bytes = counting().meter_held()
        gc.unfreeze()


def _frames_traced() -> int:
    """How often PyTorch has begun to trace something, by its own count."""
    return torch._dynamo.convert_frame.FRAME_COMPILE_COUNTER.total()


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """The bytes of each storage behind the tensors, by its address."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@contextlib.contextmanager
def gradients_on_host(model: torch.nn.Module) -> Iterator[None]:
    """In the block, a model's gradients are no memory of a GPU, where they would count in another's budget."""
    given = [p for p in model.parameters() if p.grad is not None and p.device.type != "cpu"]
    copies = [p.grad.cpu() for p in given]
    for parameter in given:
        parameter.grad = None
    yield
    for parameter, copy in zip(given, copies, strict=True):
        parameter.grad = copy.to(parameter.device)
