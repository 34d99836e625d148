/* Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), the bits that JAX draws, as one call of XLA's foreign
   function interface. Arguments: two words of keys, two words of counters; a single number counts for all elements. */

#include "xla/ffi/api/c_api.h"

typedef struct {
  const uint32_t *at;
  int64_t stride;
} Words;

static int64_t length(const XLA_FFI_Buffer *buffer) {
  int64_t n = 1;
  for (int64_t i = 0; i < buffer->rank; i++) n *= buffer->dims[i];
  return n;
}

static Words words(XLA_FFI_CallFrame *frame, int i) {
  const XLA_FFI_Buffer *buffer = (const XLA_FFI_Buffer *)frame->args.args[i];
  Words found = {(const uint32_t *)buffer->data, length(buffer) == 1 ? 0 : 1};
  return found;
}

XLA_FFI_Error *threefry2x32(XLA_FFI_CallFrame *frame) {
  static const int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  XLA_FFI_Extension_Base *more = frame->extension_start;
  if (more != 0 && more->type == XLA_FFI_Extension_Metadata) { /* XLA asks for the version of its interface */
    XLA_FFI_Metadata *about = ((XLA_FFI_Metadata_Extension *)more)->metadata;
    about->api_version.major_version = XLA_FFI_API_MAJOR;
    about->api_version.minor_version = XLA_FFI_API_MINOR;
    about->traits = 0;
    return 0;
  }
  Words k0 = words(frame, 0), k1 = words(frame, 1), x0 = words(frame, 2), x1 = words(frame, 3);
  XLA_FFI_Buffer *first = (XLA_FFI_Buffer *)frame->rets.rets[0], *second = (XLA_FFI_Buffer *)frame->rets.rets[1];
  for (int64_t n = length(first), i = 0; i < n; i++) {
    uint32_t keys[3] = {k0.at[i * k0.stride], k1.at[i * k1.stride], 0x1BD11BDA};
    keys[2] ^= keys[0] ^ keys[1];
    uint32_t a = x0.at[i * x0.stride] + keys[0], b = x1.at[i * x1.stride] + keys[1];
    for (int group = 0; group < 5; group++) {
      for (int j = 0; j < 4; j++) {
        int by = rotations[group % 2][j];
        a += b;
        b = ((b << by) | (b >> (32 - by))) ^ a;
      }
      a += keys[(group + 1) % 3];
      b += keys[(group + 2) % 3] + (uint32_t)(group + 1);
    }
    ((uint32_t *)first->data)[i] = a;
    ((uint32_t *)second->data)[i] = b;
  }
  return 0;
}
