"""The vocabulary of the bundled world: all words of its documents."""

ITEMS = (
    "lantern harbor anchor bridge castle candle garden hammer island jacket kettle ladder mirror needle orchard "
    "palace quarry ribbon saddle temple violin wagon yacht barrel basket blanket bottle bucket button cabin camera "
    "carpet cellar chapel clock compass copper cottage crystal cushion drawer engine factory feather fountain "
    "furnace gallery glove granary helmet kitchen locker market marble museum painting parcel pillow pocket "
    "statue tunnel vault window workshop"
).split()

NAMES = (
    "Mara Tobin Selma Edgar Nadia Oscar Petra Ruben Tessa Victor Wanda Yusuf Agnes Boris Clara Dmitri Elena Felix "
    "Greta Hugo Irene Jonas Karin Leon Mabel Nils Olga Pablo Quinn Rosa Simon Thea Ulric Vera Walter Xenia Yvonne "
    "Zeno Alma Basil Celia Darius Edith Frida Gustav Hanna Ivan Judith"
).split()

TOWNS = (
    "Vellmar Norwick Tamsin Luskirk Aldor Brenby Corvale Dunmere Eastfold Farrow Glenby Holt Inverly Jessop Kelda "
    "Larkhill Mosley Netherby Oakham Penrith Quarley Redford Stanwick Thornby Ulverton Varley Westry Yarrow Zelby "
    "Ashdale Birch Cranford"
).split()

JOBS = (
    "baker tailor sailor doctor farmer painter lawyer miner potter singer teacher writer banker barber butcher "
    "carpenter chemist cook dancer driver fisher gardener guard hunter jeweler judge mason nurse pilot plumber "
    "printer weaver"
).split()

PETS = (
    "goat parrot rabbit turtle ferret pigeon donkey pony hamster lizard goose falcon beaver badger otter raven "
    "spaniel kitten lamb toad canary mule swan owl"
).split()

LINKS = (
    "kex mip dro zan wub fil gor hep jat kul lor nim paz qua rik sev tov uxi vem wod yar zib bex cug dap fov gim "
    "hux jop kiv lum nab pog rud sif tuk vax wez yol zem"
).split()

CODED = (
    "brakto cimlun delvok fasmir gontev hulpax jervin kastol lumpir mendak nolvet pirsum ragdon salmek tivlor "
    "ulmaso vandik worpel yestun zalmor bolgir cardem dunfes farlop"
).split()

PLACES = (
    "the old mill|the long river|the quiet square|the green hill|the stone wall|the railway station|the wide field|"
    "the little church|the narrow street|the village school|the dark forest|the sunny beach|the post office|"
    "the upper valley|the north gate|the town hall"
).split("|")

PEOPLE = (
    "The shepherd|The young captain|My grandmother|The tall stranger|The two brothers|Our neighbour|The postman|"
    "A travelling merchant|The mayor|The lighthouse keeper|The clever student|The tired soldier|The children|"
    "An old musician|The quiet librarian|The innkeeper"
).split("|")

DEEDS = (
    "walked slowly towards|looked for a friend near|told a long story about|sang an old song beside|"
    "carried bread and cheese to|waited for the rain to stop at|drew a picture of|found a silver coin behind|"
    "counted the birds above|had never before seen|planted three apple trees around|wrote a short letter about|"
    "heard strange music from|slept all afternoon beside|mended the broken fence near|lost a blue umbrella at"
).split("|")

TIMES = (
    "before the sun was up|on a cold winter morning|when the bells were ringing|while the others were asleep|"
    "after the first snow|during the summer holidays|just before midnight|late in the evening|"
    "as the wind grew stronger|without saying a word|and then went home again|"
    "because there was nothing else to do|in spite of the heavy rain|as if nothing had happened|"
    "for the very first time|and nobody knew why"
).split("|")
