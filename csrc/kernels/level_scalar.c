/* Every kernel at the baseline instruction level: portable C, the definition the other levels must equal. */
#define QR_LEVEL_NAME scalar
#include "level.h"
